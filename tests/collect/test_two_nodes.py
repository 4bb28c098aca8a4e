"""Two nodes, each a network namespace with a spool, a collector and two ranks of its own; then one of them dies."""

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from collecting import HERE, Reading, eventually, read, wait_for_end

from headway.accounting.rules import Bucket
from headway.events import job as job_reading
from headway.events.journal import Follower
from headway.events.vocabulary import ProcessEnd, Record
from headway.paths import JOURNAL, JobPaths

STEPS = (Bucket.TRAINING_EFFECTIVE, Bucket.WASTE_REPEATED_STEPS, Bucket.WASTE_UNSAVED_STEPS)

RANKS_A_NODE = 2


class Node:
    """A network namespace: its processes reach those of the other node over a cable, and nothing else."""

    def __init__(self, name: str, number: int, folder: Path) -> None:
        self.name, self.number = name, number
        self.namespace = f"headway-{secrets.token_hex(3)}-{name}"
        self.address, self.interface = f"10.203.0.{number + 1}", f"to-{number}"
        self.spool = folder / f"spool of {name}"
        self.ranks: list[subprocess.Popen[bytes]] = []
        made = subprocess.run(["ip", "netns", "add", self.namespace], capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"needs network namespaces ({made.stderr.strip()}): run as root")

    def join(self) -> None:
        """Gives its end of the cable an address."""
        self.ip("addr", "add", f"{self.address}/24", "dev", self.interface)
        for interface in ("lo", self.interface):
            self.ip("link", "set", interface, "up")

    def ip(self, *words: str) -> None:
        subprocess.run(["ip", "-n", self.namespace, *words], check=True)

    def start(self, home: Path, master: str) -> None:
        """Starts its ranks; the first of them starts its collector."""
        for local in range(RANKS_A_NODE):
            environ = os.environ | {
                "RANK": str(self.number * RANKS_A_NODE + local), "LOCAL_RANK": str(local),
                "WORLD_SIZE": str(2 * RANKS_A_NODE), "MASTER_ADDR": master, "MASTER_PORT": "29400",
                "GLOO_SOCKET_IFNAME": self.interface, "TP_SOCKET_IFNAME": self.interface, "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            rank = [sys.executable, str(HERE / "rank_on_a_node.py"), str(self.spool), str(home), self.name]
            self.ranks.append(subprocess.Popen(["ip", "netns", "exec", self.namespace, *rank], env=environ))

    @property
    def pids(self) -> list[int]:
        """Every process on this node: its ranks, what they started, and nothing that was there before."""
        listed = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True)
        return [int(pid) for pid in listed.stdout.split()]

    def die(self) -> None:
        """All its processes are gone at once, the collector among them."""
        pids = self.pids
        for pid in pids:
            with suppress(ProcessLookupError):  # it may have ended since it was listed
                os.kill(pid, signal.SIGKILL)
        for rank in self.ranks:
            rank.wait()
        for pid in pids:
            wait_for_end(pid)

    def written(self) -> dict[str, list[Record]]:
        """What its processes wrote, as it stands in the spool."""
        paths = JobPaths(self.spool, "job").journals.iterdir()
        return {path.name.removesuffix(JOURNAL): Follower(path).poll().records for path in paths}


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    made: list[Node] = []
    try:
        for number, name in enumerate(("alpha", "beta")):
            made.append(Node(name, number, tmp_path))
        a, b = made
        ends = [[end.interface, "netns", end.namespace] for end in made]
        subprocess.run(["ip", "link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1]], check=True)
        a.join()
        b.join()
        yield a, b
    finally:
        for node in made:
            node.die()
            subprocess.run(["ip", "netns", "del", node.namespace], check=True)


@pytest.mark.needs("ip")
def test_when_a_node_dies_all_that_was_delivered_is_accounted_for(
    nodes: tuple[Node, Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    survivor, lost = nodes
    job, reading = JobPaths(tmp_path / "home", "job"), Reading(JobPaths(tmp_path / "home", "job"))
    for node in nodes:
        node.start(tmp_path / "home", survivor.address)
    everyone = list(range(2 * RANKS_A_NODE))
    eventually(lambda: [r for r, step in steps_told(reading.poll()).items() if step > 100] == everyone, "100 steps")
    assert [len(node.pids) for node in nodes] == [RANKS_A_NODE + 1] * 2, "one collector a node"
    known = {name: list(records) for name, records in reading.records.items()}
    steps_known = steps_told(reading)

    lost.die()
    # Its ranks' peers notice: the survivors stop, and so does their collector when told to.
    for rank in survivor.ranks:
        assert rank.wait() == 1
    survived = survivor.written()
    for collector in survivor.pids:  # on a busy machine it may have left by itself
        with suppress(ProcessLookupError):
            os.kill(collector, signal.SIGTERM)
        wait_for_end(collector)

    final = read(job)
    for name, records in survived.items():
        assert final.told(name) == records, "the survivors' records are complete"
        assert isinstance(records[-1], ProcessEnd)
        assert len(final.gone(name)) == 1
    assert list(JobPaths(survivor.spool, "job").journals.iterdir()) == []
    for name, records in lost.written().items():
        told = final.told(name)
        assert told == records[: len(told)], "what came from the lost node is what was written there"
        assert told[: len(known[name])] == known[name] != [], "and all that was known of it before is still there"
        assert final.gone(name) == [], "nobody saw its end"

    assert all(step >= steps_known[rank] for rank, step in steps_told(final).items())

    # A node is given up when nothing was heard of it for a while.
    monkeypatch.setattr(job_reading, "LOST_AFTER_S", 3600.0)
    assert final.reader.alive() == set(lost.written())
    monkeypatch.setattr(job_reading, "LOST_AFTER_S", 0.0)
    assert final.reader.alive() == set()
    ledger = final.ledger()
    assert ledger.state == "failed"
    assert ledger.ranks == everyone
    check_sums(final)
    (attempt,) = ledger.attempts
    for rank, view in attempt.views.items():
        assert view.member.process.node == (survivor, lost)[rank // RANKS_A_NODE].name
        assert any(ns for (bucket, _), ns in view.sums_all.items() if bucket in STEPS)

    # The node comes back, with its disk: a new collector brings the rest.
    options = [f"--spool={lost.spool}", f"--home={tmp_path / 'home'}", "--job=job", "--linger=0"]
    written = lost.written()
    subprocess.run([sys.executable, "-m", "headway.collect", *options], check=True)
    whole = read(job)
    assert {name: whole.told(name) for name in written} == written
    check_sums(whole)


def steps_told(reading: Reading) -> dict[int, int]:
    """How far each rank's training loop is known to have come."""
    told = [(timeline.process, timeline.cell) for timeline in reading.accounts._timelines.values()]
    return dict(sorted((process.rank, cell.next) for process, cell in told if process and cell))


def check_sums(reading: Reading) -> None:
    ledger = reading.ledger()
    assert sum(ledger.sums.values()) == ledger.wall_ns
    for rank in ledger.ranks:
        assert sum(ledger.rank_sums(rank).values()) == ledger.wall_ns

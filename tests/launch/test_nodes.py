"""Two supervisors as two nodes: they share a rendezvous, decide together, and survive each other."""

import signal
import subprocess
from pathlib import Path

import pytest
from supervising import LONG_S, TRAINER, descendants, report, start, trained, wait_for

from shared import free_port


class Nodes:
    """Two nodes of one job, each in a folder of its own but for the trainer's."""

    def __init__(self, home: Path, nnodes: str, backend: str, **settings: str) -> None:
        self.home, self.settings = home, settings
        endpoint = f"127.0.0.1:{free_port()}"
        host, port = endpoint.split(":")
        self.words = ["--nnodes", nnodes, "--nproc-per-node", "1", "--job", "j", "--hang-after", "15"]
        self.words += ["--rdzv-backend", backend, "--rdzv-id", "j"]
        self.words += (
            ["--rdzv-endpoint", endpoint] if backend == "c10d" else ["--master-addr", host, "--master-port", port]
        )
        # The first one hosts the rendezvous; torch's own defaults are made for networks that are slower than this.
        self.words += ["--rdzv-conf", "last_call_timeout=1,timeout=100"] if backend == "c10d" else []
        self.backend = backend
        self.nodes: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, number: int) -> "subprocess.Popen[str]":
        words = [*self.words, *(["--node-rank", str(number)] if self.backend == "static" else []), str(TRAINER)]
        folder = self.home / "job"
        folder.mkdir(exist_ok=True)
        (self.home / name).mkdir(exist_ok=True)
        out, err = (self.home / name / "stdout").open("a"), (self.home / name / "stderr").open("a")
        with out, err:
            self.nodes[name] = start(words, folder, out, err, cold=False, HEADWAY_NODE=name, **self.settings)
        return self.nodes[name]

    def said(self, name: str) -> str:
        return (self.home / name / "stderr").read_text()

    def end(self) -> None:
        for process in self.nodes.values():
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_a_failure_on_one_node_is_decided_once_and_both_restart(home: Path, backend: str) -> None:
    nodes = Nodes(home, "2", backend, FAULTS="0:1@6=kill 1:0@9=raise 2:1@12=hang", STEPS="15")
    try:
        processes = [nodes.start("a", 0), nodes.start("b", 1)]
        for process in processes:
            assert process.wait(LONG_S) == 0, nodes.said("a") + nodes.said("b")
    finally:
        nodes.end()
    found = report("j")
    assert [failure["category"] for failure in found["failures"]] == [
        "sigkill_unexplained", "python_error", "collective_timeout",
    ]  # fmt: skip
    assert [failure["rank"] for failure in found["failures"]] == [1, 0, 1]
    assert found["steps"]["new"] == 15
    assert found["steps"]["repeated"] == len(trained(home / "job")) - 15
    for name in ("a", "b"):
        assert nodes.said(name).count(" failed: sigkill_unexplained") == 1
        assert "rank 1 is missing from all_reduce" in nodes.said(name)
    assert sum(found["ledger"].values()) == pytest.approx(found["wall_s"], abs=1e-6)


def test_a_node_that_dies_is_done_without_where_the_job_may_be_smaller(home: Path) -> None:
    nodes = Nodes(home, "1:2", "c10d", STEPS="600", STEP_S="0.2")
    try:
        first = nodes.start("a", 0)
        wait_for(lambda: listens(first.pid, nodes.words), first)  # it hosts the rendezvous
        second = nodes.start("b", 1)
        wait_for(lambda: {rank for rank in (0, 1) if trained(home / "job", rank)} == {0, 1}, second)
        everybody = descendants(second.pid)
        second.send_signal(signal.SIGKILL)
        second.wait()
        wait_for(lambda: not [pid for pid in everybody if Path(f"/proc/{pid}").exists()])
        at = len(trained(home / "job"))
        wait_for(lambda: len(trained(home / "job")) > at + 5, first)
        assert max(attempt for attempt, _ in trained(home / "job")) >= 1
        # A new node is taken in.
        attempt = max(attempt for attempt, _ in trained(home / "job"))
        third = nodes.start("c", 1)
        wait_for(lambda: max(attempt for attempt, _ in trained(home / "job")) > attempt, third)
        (home / "job" / "fast").touch()
        assert first.wait(LONG_S) == 0, nodes.said("a")
        assert third.wait(LONG_S) == 0, nodes.said("c")
    finally:
        nodes.end()
    assert "nodes want to join" in nodes.said("a")
    found = report("j")
    sizes = [attempt["world_size"] for attempt in found["attempts"]]
    assert sizes[0] == 2 or sizes[0] == 1
    assert 1 in sizes
    assert sizes[-1] == 2
    assert sum(found["ledger"].values()) == pytest.approx(found["wall_s"], abs=1e-6)


def test_the_death_of_the_node_that_hosts_the_rendezvous_ends_the_job_and_says_so(home: Path) -> None:
    nodes = Nodes(home, "2", "c10d", STEPS="4000")
    try:
        first = nodes.start("a", 0)
        wait_for(lambda: listens(first.pid, nodes.words), first)
        second = nodes.start("b", 1)
        wait_for(lambda: len(trained(home / "job", 1)) > 5, second)
        first.send_signal(signal.SIGKILL)
        assert second.wait(LONG_S) == 1
        said = nodes.said("b")
    finally:
        nodes.end()
    assert "the nodes do not find each other" in said or "does not answer" in said
    assert "Traceback" not in said.rpartition("headway: rank")[2]


def listens(pid: int, words: list[str]) -> bool:
    """Whether a process has a socket on the rendezvous' port."""
    port = int(words[words.index("--rdzv-endpoint") + 1].split(":")[1])
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == "0A":
                inodes.add(f"socket:[{fields[9]}]")
    held = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            held.add(str(fd.readlink()))
        except OSError:
            continue
    return bool(inodes & held)

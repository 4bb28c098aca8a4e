"""The process that holds memory while trainers come and go, spoken to as a trainer does, without torch."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from keeping import halted, is_alive, keeper, keeper_with_clock, memory_of_checkpoints, uploader
from supervising import wait_for

from headway.checkpoint import catalog, lease, link, wire
from headway.checkpoint.arena import Arena, Shape
from headway.checkpoint.layout import new_tag, step_folder
from headway.checkpoint.lease import Taken
from headway.checkpoint.link import Link
from headway.storage import open_storage

SIZE = 50_000
PLACEHOLDER = "c0ffee00c0de"


class Trainer:
    """One rank's line to the keeper, and the events it heard."""

    def __init__(self, root: Path, session: str = "one", rank: int = 0) -> None:
        self.root, self.session, self.rank, self.heard = str(root), session, rank, list[dict[str, Any]]()
        self.link = Link(self.root, session, rank, None, self.heard.append)

    def arena(self, plan: str = "plan-2", world_size: int = 1) -> Arena:
        template = b"the metadata of " + PLACEHOLDER.encode()
        shape = Shape(
            plan=plan, rank=self.rank, world_size=world_size, image_bytes=SIZE, metadata_bytes=len(template), slots=2,
            placeholder=PLACEHOLDER,
        )  # fmt: skip
        return Arena.create(shape, template)

    def save(self, arena: Arena, step: int, tag: str = "") -> str:
        tag, slot = tag or new_tag(step), step % 2
        arena.open(slot)
        arena.image(slot)[:] = bytes([step]) * SIZE
        arena.seal(slot, tag, step, time.time_ns())
        self.link.save({
            "tag": tag, "rank": self.rank, "plan": arena.shape.plan, "root": self.root, "local": None,
            "folder": step_folder(step), "step": step, "metric": None, "saved_ns": 0, "slot": slot,
            "world_size": arena.shape.world_size, "coordinator": self.rank == 0, "job": "", "session": self.session,
            "unclaimed": None, "retention": None, "deadline_s": 240.0, "image_bytes": SIZE, "streams": False,
        })  # fmt: skip
        return tag

    def kinds(self, tag: str) -> list[str]:
        return [event["event"] for event in self.heard if event["tag"] == tag]


@pytest.fixture
def trainer(root: Path) -> Iterator[Callable[..., Trainer]]:
    made = []

    def begin(**settings: Any) -> Trainer:
        made.append(Trainer(root, **settings))
        return made[-1]

    yield begin
    for each in made:
        each.link.close()


@pytest.fixture
def later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Once this file is there, keepers have held memory for long enough. Trainers do not wait for others to leave."""
    monkeypatch.setattr(link, "_KEEPER", keeper_with_clock(tmp_path / "later"))
    monkeypatch.setattr(link, "HANDOVER_S", 0.2)
    return tmp_path / "later"


def dies(root: Path, then: str = "") -> None:
    """A trainer that hands over memory and is killed; `then` comes before that."""
    script = (
        "import os, signal, sys; sys.path[:0] = sys.argv[2:]\nfrom test_keeper import *\n"
        f"link._KEEPER = {link._KEEPER!r}\n"
        "trainer = Trainer(sys.argv[1], session='dying')\narena = trainer.arena()\ntrainer.link.hold(arena)\n"
        f"{then}\ntrainer.link.arenas()\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(root), *sys.path], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


def committed(root: Path) -> list[int | None]:
    return [each.step for each in catalog.checkpoints(open_storage(root)) if each.state == "committed"]


# --- sessions --------------------------------------------------------------------------------------------------------


def test_a_second_run_is_refused_while_the_first_one_lives(trainer: Callable[..., Trainer], later: Path) -> None:
    first = trainer(session="one")
    with pytest.raises(Taken, match=r"writes checkpoints to .*: two would mix theirs\. Choose another folder"):
        trainer(session="two")
    assert first.link.arenas() == [], "the first one is none the worse for it"
    first.link.close()
    trainer(session="two")


def test_a_second_run_waits_a_little_for_the_first_one_to_leave(trainer: Callable[..., Trainer]) -> None:
    first = trainer(session="one")
    threading.Timer(0.3, first.link.close).start()
    trainer(session="two")


def test_ranks_of_one_run_share_a_keeper_and_see_each_others_memory(
    trainer: Callable[..., Trainer], root: Path
) -> None:
    ranks = [trainer(rank=rank) for rank in range(3)]
    for rank in ranks:
        rank.link.hold(rank.arena(world_size=3))
    # Each has a line of its own, and nobody says in which order the keeper hears them.
    wait_for(lambda: sorted(arena.shape.rank for arena, _ in ranks[0].link.arenas()) == [0, 1, 2])
    keeper(root)


def test_keepers_of_two_roots_know_nothing_of_each_other(trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    one, other = trainer(session="one"), Trainer(tmp_path / "other", session="two")
    one.link.hold(one.arena())
    assert other.link.arenas() == []
    other.link.close()


def test_stores_behind_two_endpoints_have_their_own_keepers(monkeypatch: pytest.MonkeyPatch) -> None:
    places = []
    for endpoint in ("http://one:9000", "http://two:9000"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        places += [wire.place("s3://bucket/job"), wire.place("s3://bucket/job")]
    assert places[0] == places[1] != places[2] == places[3]


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become somebody else")
def test_another_user_is_sent_away(trainer: Callable[..., Trainer], root: Path) -> None:
    trainer()
    address = wire.address(wire.place(str(root)))
    if not (child := os.fork()):
        try:
            os.setuid(65534)
            end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            end.connect(address)
            end.settimeout(120)
            try:
                answer = end.send(b'{"do": "arenas"}') and end.recv(1000)
            except (BrokenPipeError, ConnectionError):
                answer = b""
            os._exit(7 if answer == b"" else 8)
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


# --- memory ----------------------------------------------------------------------------------------------------------


def test_the_next_run_gets_the_memory_of_one_that_was_killed(trainer: Callable[..., Trainer], root: Path) -> None:
    dies(root, "arena.image(1)[:] = b'x' * SIZE; arena.seal(1, '000000070000', 7, 0); arena.reached = 9")
    [(arena, pending)] = trainer(session="next").link.arenas()
    assert [(held.tag, held.step, held.slot) for held in arena.held()] == [("000000070000", 7, 1)]
    assert bytes(arena.image(1)) == b"x" * SIZE
    assert arena.reached == 9
    assert pending == []


def test_a_run_that_died_in_the_middle_of_a_copy_has_left_nothing_to_take(
    trainer: Callable[..., Trainer], root: Path
) -> None:
    dies(root, "arena.seal(0, '000000070000', 7, 0); arena.open(0); arena.image(0)[:5] = b'hello'")
    [(arena, _)] = trainer(session="next").link.arenas()
    assert arena.held() == []


def test_it_leaves_with_the_memory_when_all_have_said_goodbye(trainer: Callable[..., Trainer], root: Path) -> None:
    ranks = [trainer(rank=rank) for rank in range(2)]
    for rank in ranks:
        rank.link.hold(rank.arena(world_size=2))
    pid = keeper(root)
    assert wait_for(lambda: len(memory_of_checkpoints(pid)) == 2)
    ranks[0].link.close()
    assert len(ranks[1].link.arenas()) == 2, "one is still there"
    ranks[1].link.close()
    wait_for(lambda: not is_alive(pid))


def test_after_a_crash_it_stays_for_a_while_and_then_leaves(root: Path, later: Path) -> None:
    dies(root)
    pid = keeper(root)
    assert len(memory_of_checkpoints(pid)) == 1
    later.touch()
    wait_for(lambda: not is_alive(pid))


def test_a_python_built_for_older_kernels_holds_memory_too(
    root: Path, later: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_KEEPER", f"import os; del os.pidfd_open; {link._KEEPER}")
    dies(root)
    assert len(memory_of_checkpoints(keeper(root))) == 1


def test_a_run_that_comes_back_in_time_is_held_for_again(
    trainer: Callable[..., Trainer], root: Path, later: Path
) -> None:
    dies(root)
    pid, back = keeper(root), trainer(session="next")
    later.touch()
    for _ in range(3):  # between two answers the keeper looks whether it may leave
        assert len(back.link.arenas()) == 1
    assert keeper(root) == pid


def test_a_death_shows_even_if_data_workers_still_hold_the_connection(
    trainer: Callable[..., Trainer], root: Path, later: Path, tmp_path: Path
) -> None:
    worker = f"child = os.fork() or signal.pause()\nopen({str(tmp_path / 'worker')!r}, 'w').write(str(child))"
    silenced = "os.close(1); os.close(2); os.open('/dev/null', os.O_WRONLY); os.open('/dev/null', os.O_WRONLY)\n"
    dies(root, silenced + worker)
    pid = int((tmp_path / "worker").read_text())
    try:
        assert is_alive(pid)
        assert len(trainer(session="next").link.arenas()) == 1
    finally:
        os.kill(pid, signal.SIGKILL)


def test_memory_of_other_plans_is_let_go_of_when_told_but_not_while_it_is_uploaded(
    trainer: Callable[..., Trainer], root: Path
) -> None:
    this = trainer()
    arenas = [this.arena(f"plan{number}-2") for number in range(3)]
    for arena in arenas:
        this.link.hold(arena)
    tag = this.save(arenas[0], 1)
    wait_for(lambda: "done" in this.kinds(tag))
    with halted(uploader(root)):
        this.save(arenas[1], 2)
        this.link.keep_only("plan2-2")
        assert {arena.shape.plan for arena, _ in this.link.arenas()} == {"plan1-2", "plan2-2"}
    assert this.link.wait(timeout_s=120)
    this.link.keep_only("plan2-2")
    assert {arena.shape.plan for arena, _ in this.link.arenas()} == {"plan2-2"}


# --- uploads ---------------------------------------------------------------------------------------------------------


def test_an_upload_is_told_of_from_the_shard_to_the_commit(trainer: Callable[..., Trainer], root: Path) -> None:
    this = trainer()
    arena = this.arena()
    this.link.hold(arena)
    tag = this.save(arena, 5)
    assert this.link.wait(tag, 120)
    assert this.kinds(tag) == ["uploaded", "committed", "done"]
    [found] = catalog.checkpoints(open_storage(root))
    assert (found.step, found.state, found.size) == (5, "committed", SIZE)
    assert (root / step_folder(5) / ".metadata").read_bytes() == b"the metadata of " + tag.encode()
    assert (root / "latest").read_text().strip() == step_folder(5)


def test_only_the_first_rank_commits_and_only_when_all_are_there(trainer: Callable[..., Trainer], root: Path) -> None:
    ranks = [trainer(rank=rank) for rank in range(2)]
    arenas = [rank.arena(world_size=2) for rank in ranks]
    for rank, arena in zip(ranks, arenas, strict=True):
        rank.link.hold(arena)
    tag = ranks[0].save(arenas[0], 5)
    wait_for(lambda: "uploaded" in ranks[0].kinds(tag))
    assert committed(root) == []
    ranks[1].save(arenas[1], 5, tag)
    assert ranks[0].link.wait(tag, 120)
    assert ranks[1].link.wait(tag, 120)
    assert ranks[0].kinds(tag) == ["uploaded", "committed", "done"]
    assert ranks[1].kinds(tag) == ["uploaded", "done"]


def test_a_killed_uploader_is_followed_by_another_that_does_its_work(
    trainer: Callable[..., Trainer], root: Path
) -> None:
    this = trainer()
    arena = this.arena()
    this.link.hold(arena)
    assert this.link.wait(this.save(arena, 1), 120)
    with halted(pid := uploader(root)):
        tag = this.save(arena, 2)
        os.kill(pid, signal.SIGKILL)
    assert this.link.wait(tag, 120)
    assert committed(root) == [1, 2]


def test_an_upload_of_which_uploaders_die_is_given_up_in_the_end(trainer: Callable[..., Trainer], root: Path) -> None:
    this, pid = trainer(), 0
    arena = this.arena(world_size=2)  # the second rank never comes, so that there is time to die of it
    this.link.hold(arena)
    tag = this.save(arena, 1)
    for _ in range(3):
        pid = wait_for(lambda pid=pid: (found := uploader(root)) != pid and found)
        os.kill(pid, signal.SIGKILL)
    assert this.link.wait(tag, 120)
    assert this.heard[-1]["event"] == "failed"
    assert this.heard[-1]["error"] == "the uploader died of it 3 times"


def test_a_keeper_that_is_killed_while_a_save_is_pending_is_followed_by_another_and_it_commits(
    trainer: Callable[..., Trainer], root: Path
) -> None:
    this = trainer()
    arena = this.arena()
    this.link.hold(arena)
    assert this.link.wait(this.save(arena, 1), 120)
    pid = keeper(root)
    with halted(uploader(root)):
        tag = this.save(arena, 2)
        os.kill(pid, signal.SIGKILL)
    assert this.link.wait(tag, 120)
    assert committed(root) == [1, 2]
    assert keeper(root) != pid
    assert [found.shape.plan for found, _ in this.link.arenas()] == ["plan-2"], "the next one holds the memory as well"


def test_uploads_of_a_trainer_that_was_killed_are_finished_before_it_leaves(root: Path, later: Path) -> None:
    dies(root, "trainer.link.wait(trainer.save(arena, 1))")
    pid = keeper(root)
    with halted(uploader(root)):
        dies(root, "trainer.save(arena, 2)")
        later.touch()
        time.sleep(2.5)  # it looks every second whether it may leave
        assert is_alive(pid)
    wait_for(lambda: not is_alive(pid))
    assert committed(root) == [1, 2]


def test_the_next_run_knows_what_is_still_being_uploaded(trainer: Callable[..., Trainer], root: Path) -> None:
    dies(root, "trainer.link.wait(trainer.save(arena, 1))")
    with halted(uploader(root)):
        dies(root, "trainer.save(arena, 2)")
        back = trainer(session="next")
        [(arena, pending)] = back.link.arenas()
        assert pending == [held.tag for held in arena.held() if held.step == 2]
    wait_for(lambda: committed(root) == [1, 2])
    assert wait_for(lambda: back.kinds(pending[0])[-1:] == ["done"]), "and hears how that ended"


def test_a_save_whose_memory_is_not_there_fails_and_says_so(trainer: Callable[..., Trainer]) -> None:
    this = trainer()
    tag = this.save(this.arena("nobody-knows-2"), 1)
    assert this.link.wait(tag, 120)
    assert this.heard[-1]["error"] == "its memory is not held here"


def test_a_save_of_a_run_that_another_has_taken_over_from_is_not_committed(
    trainer: Callable[..., Trainer], root: Path
) -> None:
    this = trainer(session="one")
    arena = this.arena()
    this.link.hold(arena)
    other = lease.Owner(session="two", job="other", node="elsewhere", boot="b", pid=1, started=1)
    lease.claim(open_storage(root), other)
    tag = this.save(arena, 1)
    assert this.link.wait(tag, 120)
    assert "another job has begun to write" in this.heard[-1]["error"]
    assert committed(root) == []


# --- without torch ---------------------------------------------------------------------------------------------------


def test_keeper_and_uploader_have_no_torch_in_them(trainer: Callable[..., Trainer], root: Path) -> None:
    this = trainer()
    arena = this.arena()
    this.link.hold(arena)
    assert this.link.wait(this.save(arena, 1), 120)
    for pid in (keeper(root), uploader(root)):
        assert "torch" not in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.parametrize(
    "name", ["layout", "retention", "catalog", "interval", "arena", "keeper", "uploader", "link", "lease"]
)
def test_files_that_do_without_torch_do_not_import_it(name: str) -> None:
    code = f"import sys, headway.checkpoint.{name}; print({{'torch', 'numpy'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"

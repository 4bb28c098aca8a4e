"""Publishing is told beside the ledger, and never in it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from headway.accounting.advice import Advice, advise
from headway.accounting.attempts import Instant
from headway.accounting.ledger import JobAccounts, Ledger
from headway.accounting.publishing import Publication
from headway.accounting.rollup import roll_up
from headway.cli.main import main
from headway.events.journal import Follower
from headway.events.vocabulary import Dropped, Told
from headway.observe.summary import summary
from headway.observe.terminal import MOST_PUBLICATIONS, publication_line, render
from headway.testing import Rank, Story

ID = "story-step-00000100-ab12cd34"
RANKS = 16


def train(story: Story, ranks: int = RANKS, **handed_over: Any) -> list[Rank]:
    """A job that ends at 115 s, after 10 s of start, 100 steps and 5 s of handing over; rank 0 leaves last."""
    told = []
    for number in range(ranks):
        rank = story.rank(number, ranks).span("imports", 10).steps(100, each=1.0).saved(100)
        rank.wait(5 if number == 0 else 1)
        if number == 0:
            rank.handed_over(ID, 100, seconds=5.0, **handed_over)
        rank.finished()
        told.append(rank)
    return told


def figures(ledger: Ledger) -> object:
    """All that a ledger says of the job itself."""
    told = summary(ledger)
    del told["publications"]
    return told, ledger.sums, [ledger.rank_sums(rank) for rank in ledger.ranks]


def only(ledger: Ledger) -> Publication:
    (found,) = ledger.publications
    return found


def ends_well(story: Story) -> Rank:
    publisher = story.publisher(start=116).span("export", 20).span("upload", 4)
    publisher.published(ID, version="v1", accelerators=RANKS, device="cuda").finished()
    return publisher


def is_killed(story: Story) -> Rank:
    publisher = story.publisher(start=116).span("export", 20)
    publisher.killed(seen=True)
    return publisher


def raises(story: Story) -> Rank:
    publisher = story.publisher(start=116).span("publish", 20)
    publisher.crashed("OSError: no space left")
    return publisher


def begins_before_the_last_rank_is_gone(story: Story) -> Rank:
    publisher = story.publisher(start=112).span("checkpoint_restore", 500)
    publisher.published(ID).finished()
    return publisher


def runs_elsewhere(story: Story) -> Rank:
    publisher = story.publisher(start=130, boot="boot-9", wall_ahead=-5000.0).span("export", 30)
    publisher.published(ID).finished()
    return publisher


def was_first_on_a_node(story: Story) -> Rank:
    """Its clock was set since: what the ranks read then must not count."""
    publisher = story.publisher(start=-300, wall_ahead=77.0).span("export", 30)
    publisher.published("another").finished()
    return publisher


def says_what_ranks_say(story: Story) -> Rank:
    """Whatever a recipe does in there, it is not the job that does it."""
    publisher = story.publisher(start=116, rank=3, of=64, attempt=7).steps(20, each=1.0).saved(500)
    publisher.scheduled(-900, -800)
    publisher.recorder.record(Dropped(t_ns=publisher.clock.now_ns(), count=5))
    publisher.recorder.mark(Told.HOOK_OFF, hook="loss", error="boom")
    publisher.recorder.mark(Told.DECISION, why="it was so", attempt=None)
    publisher.recorder.mark(Told.COMPILE_CACHE, outcome="miss", why="new")
    publisher.finished()
    return publisher


def turned_out_to_be_one(story: Story) -> Rank:
    publisher = story.rank(start=116, role="process").becomes(role="publisher").span("export", 20)
    publisher.published(ID).finished()
    return publisher


LIVES = [
    ends_well, is_killed, raises, begins_before_the_last_rank_is_gone, runs_elsewhere, was_first_on_a_node,
    says_what_ranks_say, turned_out_to_be_one,
]  # fmt: skip


# --- the job's time is its own ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("alive", [False, True], ids=["gone", "alive"])
@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.__name__)
def test_the_ledger_is_the_same_whatever_a_publisher_does(
    tmp_path: Path, life: Callable[[Story], Rank], alive: bool
) -> None:
    without, story = Story(tmp_path / "without"), Story(tmp_path / "with")
    train(without)
    train(story)
    publisher = life(story)
    ledger = story.ledger(now=900, alive=(publisher,) if alive else ())
    assert figures(ledger) == figures(without.ledger(now=900))
    assert (ledger.state, ledger.wall_ns, len(ledger.attempts)) == ("ended", 115 * 10**9, 1)
    assert ledger.publications[-1].id == ID


@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.__name__)
def test_a_failed_job_stays_as_it_failed(tmp_path: Path, life: Callable[[Story], Rank]) -> None:
    told = []
    for name, publishes in (("without", False), ("with", True)):
        story = Story(tmp_path / name)
        story.rank(0, 2).steps(60, each=1.0).saved(60).wait(30).killed()
        story.rank(1, 2).steps(60, each=1.0).wait(1).crashed()
        if publishes:
            life(story)
        told.append(figures(story.ledger(now=5000)))
    assert told[0] == told[1]


def test_a_lost_node_takes_only_its_publisher_with_it(tmp_path: Path) -> None:
    without, story = Story(tmp_path / "without"), Story(tmp_path / "with")
    train(without)
    train(story)
    publisher = story.publisher(start=116, boot="boot-9").span("export", 20)
    ledger = story.ledger(now=900, lost=(publisher,))
    assert figures(ledger) == figures(without.ledger(now=900))
    assert only(ledger).outcome == "interrupted"


def test_a_finished_publisher_is_known_from_its_roll_up_alone(tmp_path: Path) -> None:
    story = Story(tmp_path)
    train(story)
    ends_well(story)
    accounts = JobAccounts()
    for path in story.paths.journals.iterdir():
        batch = Follower(path).poll()
        folded = roll_up(batch.records, batch.cell)
        accounts.add_finished(path.stem, folded, lambda b=batch: (b.records, b.cell))
    rolled, plain = accounts.ledger(Instant("boot-0", 0, 0)), story.ledger()
    assert rolled is not None
    assert summary(rolled) == summary(plain)
    assert only(rolled).pieces() == only(plain).pieces()


# --- what became of it -----------------------------------------------------------------------------------------------


@pytest.fixture
def story(tmp_path: Path) -> Story:
    told = Story(tmp_path)
    train(told)
    return told


def test_what_was_published_spares_every_accelerator_the_publishers_wall_time(story: Story) -> None:
    publisher = story.publisher(start=120).published(ID, "running", accelerators=RANKS, device="cuda")
    publisher.span("weights", 10).span("package", 23).wait(1)
    publisher.published(ID, version="v1", steps={"weights": 10.0, "package": 23.0}, accelerators=RANKS, device="cuda")
    publisher.finished()
    (told,) = summary(story.ledger())["publications"]
    assert told == {
        "id": ID, "step": 100, "recipe": "safetensors", "to": "", "runner": "local", "submitted": True,
        "outcome": "published", "version": "v1", "why": "", "handover_s": 5.0,
        "steps": {"weights": 10.0, "package": 23.0}, "tries": 1, "begin_s": 120.0, "seconds": 34.0,
        "accelerators": 16, "device": "cuda", "saved_accelerator_s": 16 * 34.0,
    }  # fmt: skip


def test_each_try_counts_and_the_last_one_decides(story: Story) -> None:
    story.publisher(start=120).published(ID, "running").span("weights", 10).killed(seen=True)
    failed = story.publisher(start=150).published(ID, "running").wait(5)
    failed.published(ID, "failed", why="the store is down").finished()
    found = only(story.ledger())
    assert (found.outcome, found.why, len(found.tries)) == ("failed", "the store is down", 2)
    assert (found.took_ns, found.saved_ns) == (15 * 10**9, 0)
    last = story.publisher(start=200).published(ID, "running").wait(7)
    assert only(story.ledger(now=210, alive=(last,))).outcome == "running"
    last.published(ID, version="v1").finished()
    found = only(story.ledger(now=300))
    assert (found.outcome, found.why, found.version, len(found.tries)) == ("published", "", "v1", 3)
    assert found.saved_ns == RANKS * (10 + 5 + 7) * 10**9


def test_what_is_published_stays_so_when_somebody_tries_again_and_dies(story: Story) -> None:
    ends_well(story)
    story.publisher(start=500).published(ID, "running").wait(3).killed()
    assert (only(story.ledger()).outcome, only(story.ledger()).version) == ("published", "v1")


def test_one_that_was_killed_before_its_first_word_worked_on_what_was_handed_over_last(tmp_path: Path) -> None:
    story = Story(tmp_path)
    rank = story.rank().steps(10, each=1.0).handed_over("early", 10).steps(10, each=1.0).handed_over("late", 20)
    rank.finished()
    story.publisher(start=15).wait(2).killed(seen=True)
    story.publisher(start=30).wait(3).killed(seen=True)
    assert [(each.id, each.took_ns // 10**9) for each in story.ledger().publications] == [("early", 2), ("late", 3)]


def test_a_publisher_whose_trainer_said_nothing_is_told_of_too(tmp_path: Path) -> None:
    story = Story(tmp_path)
    train(story, ranks=2)
    publisher = story.publisher(start=300).wait(10)
    publisher.published("by-hand", version="v7", step=100, recipe="export", device="cuda").finished()
    (first, second) = story.ledger().publications
    assert (first.id, first.outcome) == (ID, "waiting")
    assert (second.step, second.recipe, second.handover_s, second.accelerators) == (100, "export", None, 2)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ({}, "publishing step 100: handed over to local, and not begun yet"),
        ({"runner": "slurm"}, "publishing step 100: handed over to slurm, and not begun yet"),
        (
            {"submitted": False, "why": "this allocation ends with the job.\n  Then: headway publish submit x"},
            "publishing step 100: not submitted: this allocation ends with the job. Then: headway publish submit x",
        ),
    ],
)
def test_what_nobody_has_begun_says_who_was_asked_or_why_nobody_was(
    tmp_path: Path, words: dict[str, Any], line: str
) -> None:
    story = Story(tmp_path)
    train(story, **words)
    assert lines(story.ledger()) == [line]


def published(publisher: Rank) -> None:
    publisher.wait(34).published(ID, version="step-00000100-3f9a2c41", device="cuda").finished()


def published_on_cpus(publisher: Rank) -> None:
    publisher.wait(12).published(ID, version="v1", device="cpu").finished()


def rejected(publisher: Rank) -> None:
    publisher.wait(34).published(ID, "rejected", why="parity: differs by 0.3").finished()


def crashed(publisher: Rank) -> None:
    publisher.wait(34).crashed("MemoryError: ")


def killed(publisher: Rank) -> None:
    publisher.wait(34).killed(seen=True)


@pytest.mark.parametrize(
    ("ends", "line"),
    [
        (
            published,
            "published step-00000100-3f9a2c41 off the accelerators in 34.0 s: 0.15 accelerator-hours saved "
            "(16 × 34.0 s)",
        ),
        (published_on_cpus, "published v1 off the trainer in 12.0 s: 192 rank-seconds saved (16 × 12.0 s)"),
        (rejected, "publishing step 100: rejected after 34.0 s: parity: differs by 0.3"),
        (crashed, "publishing step 100: failed after 34.0 s: MemoryError:"),
        (killed, f"publishing step 100 was interrupted after 34.0 s: headway publish run {ID} goes on"),
    ],
)
def test_each_outcome_is_told_in_a_line(story: Story, ends: Callable[[Rank], None], line: str) -> None:
    ends(story.publisher(start=120))
    assert lines(story.ledger()) == [line]


def test_a_publisher_at_work_is_told_with_the_time_it_took_so_far(story: Story) -> None:
    publisher = story.publisher(start=120, boot="boot-9").published(ID, "running")
    ledger = story.ledger(now=150, alive=(publisher,))
    assert ledger.state == "ended"
    assert lines(ledger) == ["publishing step 100: under way for 30.0 s"]
    assert only(ledger).saved_ns == 0


def test_of_many_publications_the_terminal_shows_the_last(tmp_path: Path) -> None:
    story = Story(tmp_path)
    rank = story.rank()
    for number in range(MOST_PUBLICATIONS + 2):
        rank.steps(10, each=1.0).handed_over(f"p{number}", 10 * number)
    rank.finished()
    shown = screen(story.ledger())
    assert "2 earlier publications in --json and --html" in shown
    assert "step 10:" not in shown
    assert "step 20:" in shown


def test_hostile_words_of_a_publisher_cannot_move_the_cursor(story: Story) -> None:
    publisher = story.publisher(start=120).wait(1)
    publisher.published(ID, version="\x1b[2Jv1", device=7, accelerators="many", steps=[1], step={}, seconds="x")
    publisher.finished()
    told = summary(story.ledger())
    json.dumps(told, allow_nan=False)
    assert "\x1b" not in publication_line(told["publications"][0])
    assert told["publications"][0]["accelerators"] == RANKS


def lines(ledger: Ledger) -> list[str]:
    told = [publication_line(each) for each in summary(ledger)["publications"]]
    assert all(" ".join(each.split()) in screen(ledger) for each in told)
    return [each.rstrip() for each in told]


def screen(ledger: Ledger) -> str:
    out = StringIO()
    Console(file=out, width=200).print(render(summary(ledger)))
    return out.getvalue()


# --- advice ----------------------------------------------------------------------------------------------------------


def advised(ledger: Ledger, bucket: str) -> Advice:
    (found,) = (advice for advice in advise(ledger) if advice.bucket == bucket)
    return found


def test_a_trainer_that_publishes_is_told_who_else_could(tmp_path: Path) -> None:
    story = Story(tmp_path)
    for number in range(2):
        story.rank(number, 2).steps(100, each=1.0).saved(100).span("publish", 100).finished()
    advice = advised(story.ledger(), "shutdown.publish")
    assert advice.title == "publish off the accelerators, from the last checkpoint: 2 ranks waited"
    assert advice.fix.startswith('run.finish(publish="recipe.py:publish")')
    assert (advice.points, advice.seconds) == (50.0, 100.0)


def test_one_that_hands_over_already_is_not_told_to(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.rank().steps(100, each=1.0).saved(100).span("publish", 5).handed_over(ID, 100).finished()
    assert [advice for advice in advise(story.ledger()) if advice.bucket == "shutdown.publish"] == []


@pytest.mark.parametrize(("after_s", "mentions"), [(10, False), (60, True)])
def test_a_long_end_without_a_word_may_be_work_for_others(tmp_path: Path, after_s: float, mentions: bool) -> None:
    story = Story(tmp_path)
    story.rank().steps(100, each=1.0).saved(100).wait(after_s).finished()
    advice = advised(story.ledger(), "shutdown.teardown")
    assert advice.title.startswith("leave as soon as the work is done")
    assert ("run.finish(publish=" in advice.title) is mentions


def test_a_long_last_checkpoint_keeps_its_own_remedy(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.rank().steps(100, each=1.0).span("checkpoint_blocking", 60).saved(100).finished()
    assert advised(story.ledger(), "shutdown.final_checkpoint").title == "save checkpoints in the background"


# --- real processes --------------------------------------------------------------------------------------------------

TRAINER = """
import headway
run = headway.current()
for step, _ in run.steps(range(3)):
    pass
run.checkpoint_saved()
run.mark("anchor", id="x", step=3, submitted=True, runner="local", seconds=0.0)
run.finish()
"""

PUBLISHER = """
import os, sys
from headway.config import Settings
from headway.events.clock import Clock
from headway.events.journal import Writer
from headway.events.process import describe, process_name
from headway.events.recorder import Recorder
from headway.paths import JobPaths
clock = Clock()
process = describe(os.environ, "real", clock, role="publisher")
paths = JobPaths(Settings.from_environment().home_folder, "real").make()
recorder = Recorder(Writer(paths.journal(process_name(process)), clock.now_ns), clock)
recorder.record(process)
with recorder.span("weights"):
    print("at work", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    monkeypatch.setenv("HEADWAY_JOB", "real")
    return tmp_path


def asked(*words: str) -> Any:
    result = CliRunner().invoke(main, [*words, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_job_has_ended_though_its_publisher_lives(home: Path) -> None:
    subprocess.run([sys.executable, "-c", TRAINER], check=True, env=os.environ, timeout=120)
    before = asked("report", "real")
    publisher = subprocess.Popen(
        [sys.executable, "-c", PUBLISHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert publisher.stdout is not None
        assert publisher.stdout.readline() == "at work\n"
        (job,) = asked("jobs")
        during = asked("report", "real")
    finally:
        publisher.send_signal(signal.SIGKILL)
        publisher.communicate()
    after = asked("report", "real")
    assert (job["state"], job["ranks"], job["attempts"]) == ("ended", 1, 1)
    assert [[each["outcome"] for each in told["publications"]] for told in (before, during, after)] == [
        ["waiting"], ["running"], ["interrupted"]
    ]  # fmt: skip
    for told in (before, during, after):
        del told["publications"]
    assert before == during == after
    watched = CliRunner().invoke(main, ["watch", "real"])
    assert watched.exit_code == 0, watched.output

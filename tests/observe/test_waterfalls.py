"""A start-up as the terminal, the page and the JSON report show it."""

import json
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headway.accounting.ledger import Ledger
from headway.events.vocabulary import Told
from headway.observe.html import page
from headway.observe.summary import summary
from headway.observe.terminal import MOST_LEGS, MOST_STAGES, STAGE_CELLS, render
from headway.testing import Rank, Story

Stage = tuple[str, str, list[str], float, float]
"""Name, lane, needs, begin and end in seconds of the start-up."""

HOSTILE = "\x1b[2J</table><script>alert(1)</script>"


def starts(rank: Rank, *stages: Stage, serial: bool = False, failed: str = "") -> Rank:
    zero = rank.clock.now_ns()
    told = [
        {
            "name": name, "activity": "", "lane": lane, "needs": needs, "computes": lane == "main",
            "begin_ns": zero + round(begin * 1e9), "end_ns": zero + round(end * 1e9),
            "cpu_s": end - begin if lane == "main" else 0.0, "failed": name == failed,
        }
        for name, lane, needs, begin, end in stages
    ]  # fmt: skip
    rank.wait(max(stage[4] for stage in stages))
    rank.recorder.mark(Told.STARTUP, serial=serial, begin_ns=zero, stages=told)
    return rank


def shown(ledger: Ledger, attempt: int | None = None, rank: int | None = None) -> list[str]:
    out = StringIO()
    Console(file=out, width=120).print(render(summary(ledger, attempt, rank)))
    lines = out.getvalue().splitlines()
    at = next((at for at, line in enumerate(lines) if line.startswith("start-up")), len(lines))
    return [line.rstrip() for line in lines[at : lines.index("", at)]] if at < len(lines) else []


def two_ranks(home: Path) -> Ledger:
    story = Story(home)
    for rank in (0, 1):
        wait = 3.0 if rank else 1.0
        stages: list[Stage] = [
            ("data", "io", [], 0, wait),
            ("group", "comm", ["data"], wait, 4),
            ("model", "main", ["group"], 4, 8 - rank),
            ("logs", "main", [], 0, 1),
        ]
        starts(story.rank(rank, 2), *stages).steps(10, each=1).finished()
    return story.ledger()


def test_the_terminal_draws_each_stage_where_it_ran_and_marks_the_critical_path(tmp_path: Path) -> None:
    title, *stages, path, overlap = shown(two_ranks(tmp_path))
    assert title == "start-up of attempt 0  8.00 s  the stages of rank 0"
    bars = {line[2:].split()[0]: line for line in stages}
    assert list(bars) == ["data", "logs", "group", "model"]
    assert [name for name, line in bars.items() if line.startswith("▸")] == ["model"]
    begins = [re.search("[█▒]+", bars[name]) for name in ("logs", "group", "model")]
    left = begins[0].start() if begins[0] else 0
    spots = [((match.start() - left) / STAGE_CELLS, len(match[0]) / STAGE_CELLS) for match in begins if match]
    assert spots == [pytest.approx(place, abs=0.03) for place in ((0, 1 / 8), (1 / 8, 3 / 8), (4 / 8, 4 / 8))]
    assert bars["model"].endswith("4.00 s")
    assert path == "critical path: data (rank 1) → group → model (rank 0)"
    assert overlap.startswith("overlap saves up to 1.00 s of 9.00 s; at most 0.00 s more could be had")


def test_many_stages_take_a_screen_and_no_more(tmp_path: Path) -> None:
    story = Story(tmp_path)
    stages: list[Stage] = [(f"s{at}", "io", [], 0, 1 + at) for at in range(40)]
    starts(story.rank(), *stages, failed="s0").steps(10, each=1).finished()
    _, *lines, more, path, overlap = shown(story.ledger())
    assert len(lines) == MOST_STAGES
    assert lines[0].startswith("✗ s0"), "the one that failed is never folded"
    assert more.split() == ["24", "more", "each", "at", "most", "25.0", "s"]
    assert path == "critical path: s0 → 39.0 s until the rest had stopped"
    assert overlap == "stage s0 failed on rank 0"


def test_of_a_long_path_the_longest_stages_are_told(tmp_path: Path) -> None:
    story = Story(tmp_path)
    stages: list[Stage] = [(f"s{at}", "main", [], at, at + 0.5 + (at % 2) / 2) for at in range(30)]
    starts(story.rank(), *stages).steps(10, each=1).finished()
    (path,) = (line for line in shown(story.ledger()) if line.startswith("critical path"))
    assert path.startswith("critical path: … → s1 → … → s3")
    assert len(path.split("→")) <= 2 * MOST_LEGS


def test_of_several_start_ups_the_terminal_shows_the_longest_and_the_others_when_asked(tmp_path: Path) -> None:
    story = Story(tmp_path)
    serial: tuple[Stage, ...] = (("model", "main", [], 0, 4), ("data", "io", [], 4, 6))
    starts(story.rank(), *serial, serial=True).steps(5, each=1).saved(5).killed()
    overlapped: tuple[Stage, ...] = (("model", "main", [], 0, 4.5), ("data", "io", [], 0, 2))
    starts(story.rank(start=20), *overlapped).restored(5).steps(5, each=1, first=5).finished()
    ledger = story.ledger()
    lines = shown(ledger)
    assert lines[0].startswith("start-up of attempt 0  6.00 s")
    assert lines[-1] == "one stage after another, as asked: overlap could save at most 2.00 s"
    assert shown(ledger, attempt=1)[-1] == "overlap saves 1.50 s of 6.00 s; at most 0.50 s more could be had"
    report = json.loads(json.dumps(summary(ledger)))
    assert [(s["attempt"], s["serial"], s["uncontended"]) for s in report["startups"]] == [
        (0, True, True),
        (1, False, True),
    ]
    assert "Attempt 0, 6.00 s" in page(ledger, report)
    assert "Attempt 1, 4.50 s" in page(ledger, report)


def test_a_job_without_stages_shows_no_start_up(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.rank().steps(10, each=1).finished()
    ledger = story.ledger()
    assert shown(ledger) == []
    assert summary(ledger)["startups"] == []
    assert "waterfall" not in page(ledger, summary(ledger)).partition("<body>")[2]


def test_the_json_report_has_every_stage_and_a_path_as_long_as_the_start_up(tmp_path: Path) -> None:
    ledger = two_ranks(tmp_path)
    (told,) = summary(ledger)["startups"]
    assert sum(leg["seconds"] for leg in told["critical_path"]) == pytest.approx(told["wall_s"]) == 8
    stages: dict[str, dict[str, Any]] = {stage["name"]: stage for stage in told["stages"]}
    assert (stages["group"]["begin_s"], stages["group"]["end_s"]) == (1, 4)
    assert (stages["group"]["after"], stages["group"]["last_rank"]) == ("data", 1)
    assert (told["rank"], told["busy_s"], told["begin_s"]) == (0, 9, 0)
    (other,) = summary(ledger, rank=1)["startups"]
    assert other["rank"] == 1
    assert [stage["name"] for stage in other["stages"] if stage["critical"]] == ["data", "group"]


def test_names_of_stages_are_text_everywhere(tmp_path: Path) -> None:
    story = Story(tmp_path)
    starts(story.rank(), (HOSTILE, "io", [HOSTILE], 0, 2), failed=HOSTILE).steps(5, each=1).finished()
    ledger = story.ledger()
    assert "\x1b" not in "".join(shown(ledger))
    text = page(ledger, summary(ledger))
    assert "</table><script>alert" not in text
    assert "&lt;/table&gt;&lt;script&gt;alert(1)" in text


def test_the_page_draws_the_first_start_up_and_the_last_ones(tmp_path: Path) -> None:
    story = Story(tmp_path)
    for attempt in range(20):
        rank = starts(story.rank(start=100 * attempt), ("model", "main", [], 0, 1 + attempt))
        rank.steps(5, each=1, first=5 * attempt).killed()
    ledger = story.ledger()
    text = page(ledger, summary(ledger))
    assert re.findall(r"<h3>Attempt (\d+)", text) == ["0", *map(str, range(13, 20))]
    assert "12 more start-ups are in the JSON report" in text

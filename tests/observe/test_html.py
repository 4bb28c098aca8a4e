import itertools
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from headway.accounting.ledger import Ledger
from headway.accounting.rules import Bucket
from headway.observe.html import page, timeline
from headway.observe.palette import COLOURS, GROUP_COLOURS, LABELS, PUBLISHING, group
from headway.observe.summary import summary
from headway.testing import Story

needs_chromium = pytest.mark.needs("chromium")
PATIENCE_MS = 120_000
"""Longer than a browser takes on a busy machine. Its own default is five seconds."""
HOSTILE = "</script><script>window.pwned=1</script><img src=x onerror='window.pwned=1'>{{js}}&amp;"


def told(home: Path, ranks: int = 2, job: str = "story") -> Ledger:
    """Rank 1 dies at 112 s; both start again at 130 s, and rank 0 leaves first."""
    story = Story(home, job)
    for rank in range(ranks):
        process = story.rank(rank, ranks, node=f"node-{rank // 8}", launch="a")
        process.span("imports", 10).steps(50, each=1).saved(50).span("checkpoint_blocking", 2).steps(
            50, each=1, first=50
        )
        process.crashed("RuntimeError: boom") if rank == 1 else process.wait(1).killed(seen=True)
    for rank in range(ranks):
        process = story.rank(rank, ranks, start=130, node=f"node-{rank // 8}", launch="b")
        process.span("imports", 20).restored(50).steps(150, each=1, first=50).saved(200).wait(10 * (rank + 1) / ranks)
        process.finished()
    return story.ledger()


# --- palette -------------------------------------------------------------------------------------------------------


def linear(colour: str) -> list[float]:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def times(matrix: list[list[float]], vector: list[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def distance(a: str, b: str, sight: list[list[float]]) -> float:
    """How different two colours look (in Oklab, where black and white are 1 apart) to eyes of one kind."""
    to_lms = [[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]
    to_lab = [[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]
    seen = ([min(max(part, 0.0), 1.0) for part in times(sight, linear(colour))] for colour in (a, b))
    x, y = (times(to_lab, [part ** (1 / 3) for part in times(to_lms, colour)]) for colour in seen)
    return math.dist(x, y)


# Machado, Oliveira and Fernandes (2009), complete blindness to one of the three.
SIGHTS: dict[str, list[list[float]]] = {
    "all": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "no red": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "no green": [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
    "no blue": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
}


def test_every_bucket_has_a_colour_and_a_label_of_its_own() -> None:
    assert list(COLOURS) == list(LABELS) == list(Bucket)
    assert len(set(COLOURS.values())) == len(set(LABELS.values())) == len(Bucket)
    assert {group(bucket) for bucket in Bucket} == set(GROUP_COLOURS)
    assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in (*COLOURS.values(), *GROUP_COLOURS.values()))


@pytest.mark.parametrize("colour", [*COLOURS.values(), PUBLISHING])
def test_colour_stands_out_from_white_and_from_black(colour: str) -> None:
    luminance = sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True))
    assert 1.05 / (luminance + 0.05) > 2
    assert (luminance + 0.05) / 0.05 > 2


@pytest.mark.parametrize("sight", SIGHTS)
def test_training_looks_like_nothing_else_and_groups_differ_to_colour_blind_eyes(sight: str) -> None:
    effective = COLOURS[Bucket.TRAINING_EFFECTIVE]
    others = [colour for colour in (*COLOURS.values(), PUBLISHING) if colour != effective]
    assert min(distance(effective, other, SIGHTS[sight]) for other in others) > 0.07
    pairs = itertools.combinations(GROUP_COLOURS.values(), 2)
    assert min(distance(a, b, SIGHTS[sight]) for a, b in pairs) > 0.07


# --- data ----------------------------------------------------------------------------------------------------------


def test_timeline_covers_every_ranks_wall_time_without_a_gap(tmp_path: Path) -> None:
    ledger = told(tmp_path, ranks=3)
    data, cut = timeline(ledger)
    assert not cut
    assert [rank for rank, _ in data["rows"]] == [0, 1, 2]
    for _, flat in data["rows"]:
        assert sum(flat[::2]) == data["wall"] == ledger.wall_ns // 1000
        assert 0 not in flat[1::2]


def published(home: Path, start: float) -> Ledger:
    """A job of 100 s that hands over; two tries, of 10 and 30 s, with 10 s in between."""
    story = Story(home)
    for rank in range(2):
        process = story.rank(rank, 2, node="node-0").steps(100, each=1).saved(100)
        (process if rank else process.handed_over("x", 100)).finished()
    story.publisher(start=start, node="cpu-7").span(HOSTILE, 8).wait(2).killed(seen=True)
    last = story.publisher(start=start + 20, node="cpu-7").span("weights", 10).span("package", 20)
    last.published("x", version=HOSTILE, accelerators=16, device="cuda").finished()
    return story.ledger()


def test_a_publisher_has_a_row_of_its_own_and_the_axis_reaches_to_its_end(tmp_path: Path) -> None:
    data, cut = timeline(published(tmp_path, start=105))
    assert not cut
    assert data["wall"] == 155 * 10**6
    assert [sum(flat[::2]) for _, flat, *_ in data["rows"]] == [100 * 10**6, 100 * 10**6, 155 * 10**6]
    name, flat, about = data["rows"][-1]
    assert (name, about) == ("publish", "on cpu-7, no part of the job's time")
    kinds = [data["keys"][kind] for kind in flat[1::2]]
    assert [(key[1], key[2]) for key in kinds] == [
        ("", ""), ("", HOSTILE), ("", ""), ("", ""), ("", "weights"), ("", "package")
    ]  # fmt: skip
    assert [key[0] for key in kinds] == ["", "publishing", "publishing", "", "publishing", "publishing"]
    assert [took / 10**6 for took in flat[::2]] == [105, 8, 2, 10, 10, 20]


@pytest.mark.parametrize(("start", "drawn_s"), [(170, 30), (5000, 0)])
def test_what_is_published_long_after_the_job_is_cut_off_and_that_is_said(
    tmp_path: Path, start: float, drawn_s: float
) -> None:
    data, cut = timeline(published(tmp_path, start))
    assert data["wall"] == 200 * 10**6
    flat = data["rows"][-1][1]
    assert sum(took for took, kind in zip(flat[::2], flat[1::2], strict=True) if kind) == pytest.approx(
        (drawn_s - 10 * (drawn_s > 0)) * 10**6
    )
    assert cut == "What was published later than the timeline reaches is told above, and not drawn."


def test_timeline_that_is_too_fine_is_made_coarser_and_says_so(tmp_path: Path) -> None:
    story = Story(tmp_path)
    process = story.rank()
    for _ in range(100):
        process.steps(2, each=1).span("evaluation", 0.1)
    process.steps(100, each=1).finished()
    ledger = story.ledger()
    fine, _ = timeline(ledger)
    data, cut = timeline(ledger, most_pieces=40)
    assert len(fine["rows"][0][1]) // 2 > 100
    assert 2 < len(data["rows"][0][1]) // 2 <= 40
    assert sum(data["rows"][0][1][::2]) == data["wall"]
    assert "All numbers are exact" in cut


def test_page_of_8192_ranks_stays_under_5_megabytes(tmp_path: Path) -> None:
    ledger = told(tmp_path, ranks=4)
    report = summary(ledger)
    for attempt in ledger.attempts:
        attempt.views.update({rank: attempt.views[rank % 4] for rank in range(4, 8192)})
    report["ranks"] = [report["ranks"][rank % 4] | {"rank": rank, "node": f"node-{rank}"} for rank in range(8192)]
    assert len(page(ledger, report).encode()) < 5_000_000


def test_nothing_a_job_brings_in_can_end_the_data_or_fill_a_placeholder(tmp_path: Path) -> None:
    ledger = told(tmp_path)
    report = summary(ledger) | {"job": HOSTILE, "notes": [HOSTILE]}
    report["ranks"][0]["node"] = HOSTILE
    text = page(ledger, report)
    assert text.count("</script>") == 2
    assert "<img" not in text
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert "<" not in data
    assert HOSTILE in json.loads(data)["nodes"]


# --- in a browser --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        expect.set_options(timeout=PATIENCE_MS)
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"], timeout=PATIENCE_MS
        )
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Callable[[str], Page]]:
    """Opens a page's text; at the end, nothing may have gone wrong in it and nothing may have been asked for."""
    wrong: list[str] = []
    asked: list[str] = []
    context = browser.new_context(viewport={"width": 1280, "height": 1600})
    context.set_default_timeout(PATIENCE_MS)

    def open_page(text: str) -> Page:
        file = tmp_path / "report.html"
        file.write_text(text, encoding="utf-8")
        tab = context.new_page()
        tab.on("console", lambda message: wrong.append(message.text))
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto(file.as_uri())
        expect(tab.locator("#range")).not_to_be_empty()
        return tab

    yield open_page
    context.close()
    assert wrong == []
    assert [url for url in asked if not url.startswith(("data:", "file:"))] == []


def tip(tab: Page) -> list[str]:
    return tab.locator("#tip").inner_text().split("\n")


def point_at(tab: Page, ledger: Ledger, at_s: float, row: int, rows: int) -> None:
    """Moves the mouse over the timeline, to a time on a rank, while all is in view."""
    box = tab.locator("#gantt").bounding_box()
    assert box is not None
    left, top, bottom = 52, 36, 24
    x = left + (box["width"] - left) * at_s * 1e9 / ledger.wall_ns
    y = top + (box["height"] - top - bottom) * (row + 0.5) / rows
    tab.mouse.move(box["x"] + x, box["y"] + y)


@needs_chromium
def test_page_shows_the_headline_numbers_and_every_section(tmp_path: Path, opened: Callable[[str], Page]) -> None:
    ledger = told(tmp_path)
    report = summary(ledger)
    tab = opened(page(ledger, report))
    assert tab.locator("#ett").inner_text() == f"{report['ett_percent']:.1f}%"
    shown = tab.locator("body").inner_text()
    for text in (
        "story",
        "ended",
        "2 ranks · 2 attempts · 1 failure",
        "RuntimeError: boom",
        "imports",
        *report["notes"],
    ):
        assert text in shown
    for percent in ("failure", "idleness"):
        assert f"{report[f'{percent}_percent']:.1f}%" in shown
    for advice in report["advice"]:
        assert advice["fix"] in shown
    assert tab.locator("#ranks tbody tr").count() == 2
    assert tab.title() == f"story: ETT {report['ett_percent']:.1f}%"


@needs_chromium
def test_bar_tells_each_bucket_to_mouse_and_keyboard(tmp_path: Path, opened: Callable[[str], Page]) -> None:
    ledger = told(tmp_path)
    report = summary(ledger)
    tab = opened(page(ledger, report))
    tab.hover('#bar [data-key="training.effective"]')
    percent = f"{report['ett_percent']:.1f}%"
    assert tip(tab) == ["effective training", f"3m20s, {percent}", "training.effective"]
    assert tab.locator("#bar .off").count() == tab.locator("#bar i").count() - 1
    tab.focus('#bar [data-key="waste.repeated_steps"]')
    assert tip(tab)[::2] == ["repeated steps", "waste.repeated_steps"]


@needs_chromium
def test_timeline_tells_bucket_time_rank_and_attempt(tmp_path: Path, opened: Callable[[str], Page]) -> None:
    ledger = told(tmp_path)
    tab = opened(page(ledger, summary(ledger)))
    for at_s, bucket, attempt, took in (
        (5, "start.trainer_init", "attempt 0 (failed on rank 1)", "10.0 s"),
        (40, "training.effective", "attempt 0 (failed on rank 1)", "50.0 s"),
        (61, "waste.checkpoint_blocking", "attempt 0 (failed on rank 1)", "2.00 s"),
        (175, "waste.repeated_steps", "attempt 1 (ended)", "50.0 s"),
        (250, "training.effective", "attempt 1 (ended)", "1m40s"),
    ):
        point_at(tab, ledger, at_s, 1, 2)
        title, time, rank, in_attempt, key = tip(tab)
        assert title.startswith(LABELS[Bucket(bucket)])
        assert (rank, in_attempt, key) == ("rank 1 on node-0", attempt, bucket)
        assert time.startswith(took)


@needs_chromium
def test_timeline_tells_what_a_publisher_did_and_the_page_what_it_spared(
    tmp_path: Path, opened: Callable[[str], Page]
) -> None:
    ledger = published(tmp_path, start=105)
    tab = opened(page(ledger, summary(ledger)))
    shown = HOSTILE.replace("\n", " ")
    line = f"published {shown} off the accelerators in 40.0 s, 2 tries: 0.18 accelerator-hours saved (16 × 40.0 s)"
    assert tab.locator(".publications li").inner_text() == line
    assert tab.locator("#range").inner_text().endswith("ranks 0 to 1 and publishing")
    for at_s, title in (
        (109, f"publishing: {HOSTILE}"),
        (114, "publishing"),
        (120, "nobody published"),
        (145, "publishing: package"),
    ):
        point_at(tab, ledger, at_s / 1.55, 2, 3)
        assert tip(tab)[0] == title
        assert tip(tab)[2] == "on cpu-7, no part of the job's time"
    point_at(tab, ledger, 50 / 1.55, 1, 3)
    assert tip(tab)[2:] == ["rank 1 on node-0", "attempt 0 (ended)", "training.effective"]
    point_at(tab, ledger, 140 / 1.55, 1, 3)
    assert tab.locator("#tip").is_hidden()
    tab.focus("#gantt")
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight"):
        tab.keyboard.press(key)
    assert "no part of the job's time" in tab.locator("#said").inner_text()
    assert tab.evaluate("window.pwned") is None


@needs_chromium
def test_timeline_can_be_walked_and_zoomed_by_keyboard(tmp_path: Path, opened: Callable[[str], Page]) -> None:
    ledger = told(tmp_path)
    tab = opened(page(ledger, summary(ledger)))
    shown = tab.locator("#range")
    whole = shown.inner_text()
    tab.focus("#gantt")
    tab.keyboard.press("ArrowDown")
    assert tab.locator("#said").inner_text().startswith("trainer start: imports, 10.0 s, ")
    tab.keyboard.press("ArrowRight")
    said = tab.locator("#said").inner_text()
    assert said.startswith("effective training, ")
    assert "rank 1 on node-0" in said
    tab.keyboard.press("+")
    expect(shown).not_to_have_text(whole)
    tab.keyboard.press("0")
    expect(shown).to_have_text(whole)


@needs_chromium
def test_hostile_names_are_shown_and_never_run(tmp_path: Path, opened: Callable[[str], Page]) -> None:
    story = Story(tmp_path)
    process = story.rank(node=HOSTILE)
    process.span(HOSTILE, 10).steps(50, each=1)
    process.crashed(HOSTILE)
    ledger = story.ledger()
    report: dict[str, Any] = summary(ledger)
    report |= {"job": HOSTILE, "notes": [HOSTILE], "failures": [report["failures"][0] | {"category": HOSTILE}]}
    report["advice"] = [{"title": HOSTILE, "points": 1.0, "seconds": 1.0, "fix": HOSTILE, "bucket": "waste.stall"}]
    tab = opened(page(ledger, report))
    point_at(tab, ledger, 5, 0, 1)
    assert f"rank 0 on {HOSTILE}" in tip(tab)
    assert tab.locator("h1").inner_text() == HOSTILE
    assert tab.locator("#ranks td").nth(1).inner_text() == HOSTILE
    assert tab.locator("body").inner_text().count(HOSTILE) >= 6
    assert tab.evaluate("window.pwned") is None
    assert tab.locator("img").count() == 0


@needs_chromium
def test_policy_of_the_page_blocks_foreign_scripts_and_the_network(tmp_path: Path, browser: Browser) -> None:
    ledger = told(tmp_path)
    file = tmp_path / "report.html"
    file.write_text(page(ledger, summary(ledger)), encoding="utf-8")
    tab = browser.new_page()
    tab.set_default_timeout(PATIENCE_MS)
    tab.goto(file.as_uri())
    blocked = tab.evaluate(
        """async () => {
            const blocked = [];
            document.addEventListener("securitypolicyviolation", (event) => blocked.push(event.effectiveDirective));
            const script = document.createElement("script");
            script.textContent = "window.pwned = 1";
            document.body.append(script);
            await fetch("http://127.0.0.1:9/").catch(() => {});
            for (let looks = 0; looks < 1000 && (looks < 1 || blocked.length < 2); looks++)
                await new Promise((done) => setTimeout(done, 50));
            return blocked;
        }"""
    )
    assert sorted(blocked) == ["connect-src", "script-src-elem"]
    assert tab.evaluate("window.pwned") is None
    tab.close()


@needs_chromium
def test_512_ranks_open_zoom_and_pan(tmp_path: Path, opened: Callable[[str], Page]) -> None:
    ledger = told(tmp_path, ranks=512)
    text = page(ledger, summary(ledger))
    assert len(text.encode()) < 5_000_000
    tab = opened(text)
    shown = tab.locator("#range")
    assert shown.inner_text().endswith("ranks 0 to 511")
    point_at(tab, ledger, 40, 300, 512)
    assert tip(tab)[2] == "rank 300 on node-37"
    tab.mouse.wheel(0, -600)
    expect(shown).not_to_have_text(re.compile("^0:00:00 "))
    tab.keyboard.down("Shift")
    tab.mouse.wheel(0, -1200)
    tab.keyboard.up("Shift")
    expect(shown).not_to_have_text(re.compile("511$"))
    assert tip(tab)[2] in [f"rank {rank} on node-37" for rank in (299, 300, 301)]
    before = shown.inner_text()
    tab.mouse.down()
    tab.mouse.move(700, 500, steps=4)
    tab.mouse.up()
    expect(shown).not_to_have_text(before)
    tab.get_by_role("button", name="whole job").click()
    expect(shown).to_have_text(re.compile("ranks 0 to 511$"))


@needs_chromium
def test_ranks_sort_by_any_column_and_unfold(tmp_path: Path, opened: Callable[[str], Page]) -> None:
    ledger = told(tmp_path, ranks=40)
    tab = opened(page(ledger, summary(ledger)))
    rows = tab.locator("#ranks tbody tr")
    assert rows.count() == 32
    tab.locator("#more").click()
    assert rows.count() == 40
    tab.locator("#ranks thead button", has_text="node").click()
    tab.locator("#ranks thead button", has_text="node").click()
    assert rows.first.locator("td").nth(1).inner_text() == "node-4"
    tab.locator("#ranks thead button", has_text=re.compile("^shutdown$")).click()
    assert rows.first.locator("td").first.inner_text() == "0"


@needs_chromium
@pytest.mark.parametrize("kind", ["no step", "running", "elastic", "without a journal"])
def test_page_opens_for_unusual_jobs(kind: str, tmp_path: Path, opened: Callable[[str], Page]) -> None:
    story = Story(tmp_path)
    match kind:
        case "no step":
            story.rank().crashed()
            ledger = story.ledger()
        case "running":
            process = story.rank().steps(10, each=1)
            ledger = story.ledger(now=12, alive=(process,))
        case "elastic":
            for rank in range(4):
                story.rank(rank, 4, launch="a").steps(10, each=1).killed(seen=True)
            for rank in range(2):
                story.rank(rank, 2, start=20, launch="b").steps(10, each=1).finished()
            ledger = story.ledger()
        case _:
            story.rank(1, 3).steps(10, each=1).finished()
            ledger = story.ledger()
    tab = opened(page(ledger, summary(ledger)))
    tab.focus("#gantt")
    for key in ("ArrowDown", "ArrowRight", "ArrowDown", "ArrowDown", "ArrowRight", "+", "]", "0"):
        tab.keyboard.press(key)
    assert tab.locator("h1").inner_text() == "story"

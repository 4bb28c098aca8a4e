"""`headway checkpoint interval` as a user types it."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from headway.cli.checkpoint_interval import interval
from headway.errors import InputError

GIVEN = ("--blocking", "15", "--failures-per-day", "3")


def run(*words: str | Path, width: int = 80) -> Result:
    return CliRunner().invoke(interval, list(map(str, words)), env={"COLUMNS": str(width), "NO_COLOR": "1"})


def test_the_optimum_stands_first_and_its_neighbours_below() -> None:
    told = run(*GIVEN)
    assert told.exit_code == 0
    assert told.output.startswith("Save every 929.5 s (15m30s): 3.23% of the time is wasted")
    rows = {
        line.split()[0]: line.split()[1:] for line in told.output.splitlines() if line.rstrip().endswith(("×", "best"))
    }
    assert rows["15m30s"] == ["3.23%", "1.61%", "1.61%", "the", "best"]
    assert rows["1h00m"] == ["6.67%", "0.42%", "6.25%", "2.07×"]
    assert {"5m00s", "7m45s", "15m00s", "30m59s"} <= set(rows)


def test_the_curve_is_drawn_lowest_above_the_mark_of_the_optimum() -> None:
    lines = run(*GIVEN).output.splitlines()
    axis = next(line for line in lines if "└" in line)
    rows = [line.ljust(len(axis)) for line in lines if "┤" in line or "│" in line]
    heights = [sum(row[column] in "█▒" for row in rows) for column in range(8, len(axis))]
    best = axis.index("▲") - 8
    assert heights[best] == min(heights)
    assert heights[0] == heights[-1] == max(heights) == len(rows)
    assert heights[: best + 1] == sorted(heights[: best + 1], reverse=True)
    assert heights[best:] == sorted(heights[best:])


@pytest.mark.parametrize(("blocking", "per_day", "upload"), [(15, 3, 0), (0.01, 1000, 0), (600, 0.01, 40000)])
def test_everything_fits_a_terminal_of_80_columns(blocking: float, per_day: float, upload: float) -> None:
    told = run("--blocking", str(blocking), "--failures-per-day", str(per_day), "--upload", str(upload))
    assert told.exit_code == 0
    assert max(map(len, told.output.splitlines())) <= 80


def test_json_has_the_interval_its_waste_and_the_curve() -> None:
    told = json.loads(run(*GIVEN, "--json").output)
    assert (told["interval_s"], told["wasted_percent"]) == (929.5, 3.23)
    assert {"interval_s": 3600.0, "wasted_percent": 6.67, "blocking_percent": 0.417, "lost_percent": 6.25} in told[
        "neighbours"
    ]
    assert min(told["curve"], key=lambda point: point["wasted_percent"])["wasted_percent"] == 3.23


def test_slower_steps_and_late_uploads_are_counted() -> None:
    told = json.loads(run("--blocking", "5", "--inflation", "10", "--upload", "60", *GIVEN[2:], "--json").output)
    assert told["interval_s"] == 929.5
    assert told["wasted_percent"] == pytest.approx(3.2275 + 100 * 60 * 3 / 86400, abs=0.01)


def test_where_saves_would_queue_it_says_so() -> None:
    told = run("--blocking", "1", "--failures-per-day", "24", "--upload", "600").output
    assert told.startswith("Save every 601.0 s")
    assert "more often, saves would queue" in told
    assert "saves would queue" in next(line for line in told.splitlines() if line.strip().startswith("5m00s  21"))


@pytest.mark.parametrize("option", ["--blocking", "--failures-per-day", "--inflation", "--upload"])
@pytest.mark.parametrize("bad", ["-1", "nan", "inf", "0"])
def test_what_cannot_be_is_refused_by_option_and_value(option: str, bad: str) -> None:
    told = run(*GIVEN, option, bad)
    if bad == "0" and option in ("--inflation", "--upload"):
        assert told.exit_code == 0
        return
    assert isinstance(told.exception, InputError)
    assert f"{option} is {bad}" in str(told.exception)


@pytest.mark.needs_package("matplotlib")
def test_a_picture_is_written_or_says_why_not(tmp_path: Path) -> None:
    told = run(*GIVEN, "--png", tmp_path / "curve.png")
    assert told.exit_code == 0
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "cannot be written" in str(run(*GIVEN, "--png", tmp_path / "no" / "curve.png").exception)


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    error = run(*GIVEN, "--png", tmp_path / "curve.png").exception
    assert isinstance(error, InputError)
    assert "pip install matplotlib" in str(error)
    assert not (tmp_path / "curve.png").exists()

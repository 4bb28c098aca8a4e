"""A journal holds every acknowledged record, at whatever instant its process is killed."""

import concurrent.futures
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from journals import apart, check_killed, kill_many, ledger_of, read

from headway.events.journal import FIRST_SEGMENT_BYTES
from headway.events.vocabulary import StepRun

SEED = int(os.environ.get("SEED", "1"))


@pytest.mark.parametrize(("how", "kills"), [("mapped", 160), ("plain", 40), ("mapped, then plain", 20)])
def test_kills_at_random_instants_lose_nothing_that_was_acknowledged(
    tmp_path: Path, how: str, kills: int, record_property: Callable[[str, object], None]
) -> None:
    record_property("kills", kills)
    seeds = (2 * SEED, 2 * SEED + 1)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        exits = pool.map(apart, [kill_many] * 2, [tmp_path] * 2, [kills // 2] * 2, seeds, [how] * 2)
        assert list(exits) == [0, 0]
    acknowledged = {}
    for seed in seeds:
        acknowledged |= json.loads((tmp_path / f"{seed}.json").read_text())
    assert len(acknowledged) == kills
    largest = runs = 0
    for name, step in acknowledged.items():
        path = tmp_path / name
        if step < 0 and not path.exists():
            continue
        batch = read(path)
        check_killed(batch, step)
        ledger = ledger_of(batch)
        if step >= 0:
            assert ledger is not None
            assert step <= sum(ledger.steps.values()) <= step + 1
        largest = max(largest, len(batch.raw))
        runs += sum(isinstance(record, StepRun) for record in batch.records)
    assert largest > FIRST_SEGMENT_BYTES, "no journal lived long enough to grow"
    assert runs > kills, "too few runs of steps were moved from the cell into records"

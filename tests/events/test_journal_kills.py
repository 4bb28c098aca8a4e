"""Whatever instant a process is killed at, its journal holds all it was told had been written."""

import concurrent.futures
import json
from pathlib import Path

import pytest
from journals import apart, check_killed, kill_many, ledger_of, read

from headway.events.journal import FIRST_SEGMENT_BYTES
from headway.events.vocabulary import StepRun


@pytest.mark.parametrize(("how", "kills"), [("mapped", 1000), ("plain", 200), ("mapped, then plain", 50)])
def test_kills_at_random_instants_lose_nothing_that_was_acknowledged(tmp_path: Path, how: str, kills: int) -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        exits = pool.map(apart, [kill_many] * 2, [tmp_path] * 2, [kills // 2] * 2, (1, 2), [how] * 2)
        assert list(exits) == [0, 0]
    acknowledged = {}
    for seed in (1, 2):
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

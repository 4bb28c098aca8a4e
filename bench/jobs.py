"""Jobs of any size on disk, made fast: each process's records are the real recorder's, and only who it is varies.

One attempt of one local rank is recorded once, with a fake clock, and rolled up once. Every node then holds those bytes
behind a `Process` record of its own, with a wall clock of its own a few milliseconds off. No step, save or span is made
up by hand.
"""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.accounting.rollup import roll_up
from headway.events.journal import HEADER_BYTES, Cell, decode_frames, frame, parse_cell
from headway.events.node import Chunk, rolled_up, witnessed
from headway.events.vocabulary import STAGES, Process, ProcessGone, Saved, encode
from headway.paths import JobPaths
from headway.testing import Rank, Story

RANKS_A_NODE = 8
STEPS, STEP_S, SAVES, STALL_AT = 1000, 1.0, (400, 800), 600
ATTEMPT_S = STEPS * STEP_S + 300


@dataclass
class Template:
    """What one local rank writes in one attempt."""

    process: dict[str, Any]
    header: bytes
    cell: Cell | None
    startup: bytes
    """Its frames behind the `Process` record, up to the first step …"""
    training: bytes
    """… and the rest of them."""
    records: int
    gone: ProcessGone | None
    rolled_up: dict[str, Any]


def templates(attempts: int, world: int, stall_s: float = 0.0) -> list[list[Template]]:
    """For each attempt, the records of each local rank: all but the last attempt end by a kill, after one stall each if
    `stall_s` is not 0."""
    with tempfile.TemporaryDirectory() as folder:
        story = Story(Path(folder))
        return [
            [_template(story, attempt, local, attempt == attempts - 1, world, stall_s) for local in range(RANKS_A_NODE)]
            for attempt in range(attempts)
        ]


def _template(story: Story, attempt: int, local: int, last: bool, world: int, stall_s: float) -> Template:
    rank = story.rank(
        local, world, start=attempt * ATTEMPT_S + 0.01 * local, local_rank=local, launcher="4711-1234567",
        launcher_started_ns=story_ns(0), launch=f"4711-1234567/{attempt}//0", program="/opt/team/recommender/train.py",
        command="python -u /opt/team/recommender/train.py --config conf/large.yaml --global-batch 65536",
    )  # fmt: skip
    step = attempt * SAVES[-1]
    for place, stage in enumerate(STAGES[1:]):
        rank.span(stage, 4.0 + place + 0.01 * local)
    if attempt:
        rank.span("checkpoint_restore", 5.0).restored(step)
    split = rank.recorder.writer._end
    with rank.during("pt2_compilation"):
        rank.wait(30.0)
    _train(rank, step, local, stall_s)
    if last:
        rank.finished()
    else:
        rank.killed()
    data = rank.recorder.writer.path.read_bytes()
    batch = decode_frames(data[HEADER_BYTES:])
    first = encode(batch.records[0])
    begin, end = HEADER_BYTES + len(frame(first)), HEADER_BYTES + len(batch.raw)
    gone = None if last else ProcessGone(t_ns=rank.clock.now_ns() + 1_000_000_000)
    cell = parse_cell(data[:HEADER_BYTES])
    whole = roll_up([*batch.records, *([gone] if gone else [])], cell)
    return Template(
        json.loads(first[1:]), data[:HEADER_BYTES], cell, data[begin:split], data[split:end],
        len(batch.records) + (not last), gone, json.loads(whole),
    )  # fmt: skip


def _train(rank: Rank, first: int, local: int, stall_s: float) -> None:
    def batches() -> Iterator[int]:
        for step in range(first, first + STEPS):
            rank.clock.advance(0.002 + 0.0001 * (step % 7))
            yield step

    for step, _ in rank.recorder.steps(batches(), first, 64):
        stalled = stall_s if step - first == STALL_AT else 0.0
        rank.clock.advance(STEP_S + 0.001 * ((step * 7 + local * 3) % 13) + stalled)
        if step - first + 1 in SAVES:
            rank.span("checkpoint_blocking", 1.5)
            rank.recorder.record(Saved(t_ns=rank.clock.now_ns(), step=step + 1, path="s3://bucket/job/checkpoints"))


def story_ns(at: float) -> int:
    """A moment of a story on its monotonic clock."""
    return round((at + 5000.0) * 1e9)


def _process(t: Template, node: int, attempt: int) -> tuple[str, dict[str, Any], bytes]:
    """The name of the process on one node, who it is, and the frame that says so."""
    local, name = t.process["rank"], f"gpu-{node:04d}.cluster.example"
    mine = t.process | {
        "rank": node * RANKS_A_NODE + local, "node": name, "boot": f"{node:08x}-64d2-4f7c-9c58-1d0e6a3b1c42",
        "pid": 10_000 + attempt * 97 + local, "wall_ns": t.process["wall_ns"] + node % 50 * 1_000_000,
    }  # fmt: skip
    return f"{name}-{node:08x}-{mine['pid']}-{attempt}", mine, frame(bytes([Process.KIND]) + _json(mine))


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def write_journals(paths: JobPaths, ranks: int, attempts: int) -> int:
    """One journal file a process; returns how many records they hold."""
    paths.make()
    made, records = templates(attempts, ranks), 0
    for node in range(ranks // RANKS_A_NODE):
        for attempt, locals_ in enumerate(made):
            for t in locals_:
                name, _, first = _process(t, node, attempt)
                last = b"" if t.gone is None else frame(encode(t.gone))
                paths.journal(name).write_bytes(t.header + first + t.startup + t.training + last)
                records += t.records
    return records


def write_nodes(paths: JobPaths, ranks: int, attempts: int, *, stall_s: float = 0.0, with_roll_ups: bool = True) -> int:
    """One node file a node, as its collector would: for each process a chunk at its start, one while it trains, one
    when it is gone, and its roll-up; returns how many records they hold."""
    paths.make()
    made, records = templates(attempts, ranks, stall_s), 0
    for node in range(ranks // RANKS_A_NODE):
        chunks = []
        for attempt, locals_ in enumerate(made):
            for t in locals_:
                name, process, first = _process(t, node, attempt)
                head, wall = first + t.startup, process["wall_ns"]
                at, alive = HEADER_BYTES + len(head), t.gone is not None
                chunks.append(Chunk(name, True, wall + 10**10, HEADER_BYTES, head))
                chunks.append(Chunk(name, alive, wall + 10**12, at, t.training, t.cell))
                if t.gone is not None:
                    chunks.append(witnessed(name, t.gone, wall + 2 * 10**12))
                if with_roll_ups:
                    chunks.append(rolled_up(name, _json(t.rolled_up | {"process": process}), wall + 2 * 10**12))
                records += t.records
        paths.node(f"gpu-{node:04d}").write_bytes(b"".join(chunk.encode() for chunk in chunks))
    return records


def write_nodes_only(paths: JobPaths, ranks: int, attempts: int) -> int:
    """As `write_nodes`, where the collectors did not live to roll anything up."""
    return write_nodes(paths, ranks, attempts, with_roll_ups=False)


def write_nodes_stalled(paths: JobPaths, ranks: int, attempts: int) -> int:
    """As `write_nodes`, with a step in each attempt in which all ranks stall, and none can say why."""
    return write_nodes(paths, ranks, attempts, stall_s=60.0)

"""torchtitan's traces, imported: every second of them in its bucket, and nothing made up."""

import importlib.util
import json
import os
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import warm
from headway.accounting.attempts import Instant
from headway.accounting.ledger import JobAccounts, Ledger, by_bucket
from headway.accounting.rules import Bucket
from headway.errors import InputError, PlatformError
from headway.events.job import JobReader
from headway.events.vocabulary import Mark
from headway.instrument.importers.torchtitan import Imported, import_traces
from headway.paths import JobPaths

EPOCH_S = 1_700_000_000


class Trace:
    """One process's trace in the format of torchtitan 0.3.0, written with a clock that moves when told to."""

    def __init__(
        self, folder: Path, rank: int = 0, *, at: float = 0.0, pid: int = 100, host: str = "node-a", file: str = "",
        source: str = "training", first_seq: int = 0,
    ) -> None:  # fmt: skip
        logs = folder / "structured_logs"
        logs.mkdir(parents=True, exist_ok=True)
        self.path = logs / (file or f"{source}.global_rank_{rank}.20231114-221320-{pid:06d}.jsonl")
        self.at, self.clock_ahead, self.seq, self.last = at, 0.0, first_seq, {}
        self.now_step: dict[str, Any] = {}
        self.fields = {
            "rank": rank, "global_rank": rank, "local_rank": rank, "source": source, "host_name": host, "pid": pid,
        }  # fmt: skip
        self.lines: list[str] = []
        self.moment("structured_logger_started")

    def line(self, name: str, kind: str = "event", tid: int = 7, **more: Any) -> None:
        wall_us = round((EPOCH_S + self.at + self.clock_ahead) * 1e6)
        delta_ms = (self.at - self.last[tid]) * 1e3 + 0.02 if tid in self.last else 0.0001
        self.last[tid] = self.at
        fields = {"delta_ms": delta_ms, "tid": tid, **self.fields, **self.now_step, "time_us": wall_us}
        fields |= {"log_type": kind, "log_type_name": name, "event_name": None, "seq_id": self.seq, "message": name}
        self.seq += 1
        self.lines.append(json.dumps(fields | more))
        self.path.write_text("".join(f"{line}\n" for line in self.lines))

    def moment(self, name: str, **more: Any) -> "Trace":
        self.line(name, "instant", **more)
        return self

    @contextmanager
    def during(self, name: str, error: str = "", **more: Any) -> Iterator[None]:
        begun = self.at
        self.line(f"{name}_start", **more)
        yield
        if error:
            self.line(f"{name}_error", message=f"[step N/A] {name}_error: {error}", **more)
        self.line(f"{name}_end", value=(self.at - begun) * 1e3, **more)

    def span(self, name: str, seconds: float, **more: Any) -> "Trace":
        with self.during(name, **more):
            self.at += seconds
        return self

    def step_begins(self, number: int, loaded: int = 0, data: float = 0.0) -> "Trace":
        self.now_step = {"step": number, "relative_step": number - loaded}
        self.line("step_start")
        return self.span("gc_collect", 0.0).span("fetching_batch", data)

    def step(self, number: int, each: float, *, loaded: int = 0, data: float = 0.0, save: float = 0.0) -> "Trace":
        begun = self.at
        self.step_begins(number, loaded, data)
        self.moment("metric_value", event_name="loss", value=2.5).span("fwd_bwd", each)
        with self.during("checkpoint_save"):
            self.at += save
            if save:
                self.now_step["step_tags"] = ["checkpoint_save"]
        self.line("step_end", value=(self.at - begun) * 1e3)
        return self

    def steps(self, first: int, last: int, each: float, **more: Any) -> "Trace":
        for number in range(first, last + 1):
            self.step(number, each, **more)
        return self

    def torn_down(self, seconds: float = 0.0) -> "Trace":
        self.now_step = {}
        return self.span("torch_distributed_teardown", seconds)


def ledger_of(home: Path, job: str) -> Ledger:
    accounts = JobAccounts()
    for name, batch in JobReader(JobPaths(home, job)).poll():
        assert not batch.problems
        accounts.take(name, batch)
    ledger = accounts.ledger(Instant("now", 0, 2**62))
    assert ledger is not None
    assert sum(ledger.buckets.values()) == ledger.wall_ns
    for rank in ledger.ranks:
        with_it = [attempt for attempt in ledger.attempts if rank < attempt.attempt.world_size]
        assert sum(ledger.rank_sums(rank).values()) == sum(attempt.wall_ns for attempt in with_it)
    return ledger


def imported(home: Path, *given: Path, job: str = "titan") -> tuple[Ledger, Imported]:
    told = import_traces(given, home, job)
    return ledger_of(home, job), told


def seconds(ledger: Ledger) -> dict[str, float]:
    return {str(key): round(ns / 1e9, 4) for key, ns in ledger.buckets.items() if round(ns / 1e9, 4)}


def stages(ledger: Ledger) -> dict[str, float]:
    return {str(stage): round(ns / 1e9, 4) for (_, stage), ns in ledger.sums.items() if stage}


def shown(ledger: Ledger) -> list[str]:
    return [bar.name for view in ledger.attempts[0].views.values() for bar in view.member.timeline.bars()]


def test_a_clean_run_has_every_second_in_its_bucket(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "dump")
    with trace.during("Trainer.Config.build"):
        trace.span("torch_distributed_init", 2).span("Llama3Model.Config.build", 1).span("model_parallelism_init", 4)
        trace.span("HuggingFaceTextDataLoader.Config.build", 3).span("CheckpointManager.Config.build", 0.5)
        trace.at += 0.5
    trace.moment("training_start").span("checkpoint_load", 0.25)
    trace.steps(1, 20, 0.75, data=0.25).step(21, 0.75, data=0.25, save=6).steps(22, 40, 0.75, data=0.25)
    trace.step_begins(41, data=0.25).span("fwd_bwd", 0.75).span("eval", 5).line("step_end", value=6000)
    trace.torn_down(1.5)
    ledger, told = imported(tmp_path / "home", tmp_path / "dump")
    assert seconds(ledger) == {
        "start.trainer_init": 11.25 + 0.25, "training.effective": 21 * 0.75, "waste.unsaved_steps": 20 * 0.75,
        "waste.data_wait": 40 * 0.25, "waste.checkpoint_blocking": 6.0, "waste.evaluation": 5.0,
        "shutdown.teardown": 1.5,
    }  # fmt: skip
    assert stages(ledger) == {
        "process_group_init": 2, "train_module_creation": 5, "preproc_creation": 3, "init_plugins": 0.5,
        "pre_train": 0.25, "get_first_batch_data": 0.25, "other": 0.5,
    }  # fmt: skip
    assert ledger.state == "ended"
    assert (told.processes, told.ranks, told.steps, told.problem) == (1, {0}, 41, "")


def test_the_report_works_on_an_imported_job(home: Path, tmp_path: Path) -> None:
    Trace(tmp_path / "llama").span("torch_distributed_init", 2).steps(1, 30, 1.0, save=0.0).torn_down()
    said = headway("import", "torchtitan", str(tmp_path / "llama"))
    assert said.startswith("imported llama (ranks: 1, processes: 1, steps: 30, spans inside ordinary steps, not kept: ")
    assert said.endswith("\nheadway report llama\n")
    report = json.loads(headway("report", "llama", "--json"))
    assert report["steps"] == {"new": 30, "repeated": 0, "unsaved": 0}
    assert sum(report["ledger"].values()) == pytest.approx(report["wall_s"])
    assert "llama" in headway("report")


def headway(*words: str, code: int = 0, errors: bool = False) -> str:
    done = subprocess.run([sys.executable, "-m", "headway", *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    return done.stderr if code or errors else done.stdout


def test_a_killed_job_that_goes_on_from_its_checkpoint_repeats_steps(tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    for rank in (0, 1):
        first = Trace(dump, rank, pid=100 + rank).steps(1, 49, 1.0).step(50, 1.0, save=2.0).steps(51, 80, 1.0)
        first.step_begins(81).line("fwd_bwd_start")
        again = Trace(dump, rank, pid=200 + rank, at=100).span("checkpoint_load", 4)
        again.steps(51, 99, 1.0, loaded=50).step(100, 1.0, loaded=50, save=2.0).torn_down(1.0)
    first.path.write_text(first.path.read_text()[:-100])
    ledger, told = imported(tmp_path / "home", dump)
    assert seconds(ledger) == {
        "training.effective": 100.0, "waste.repeated_steps": 30.0, "waste.checkpoint_blocking": 4.0,
        "recover.detection": 18.0, "recover.checkpoint_restore": 4.0, "shutdown.teardown": 1.0,
    }  # fmt: skip
    assert [attempt.outcome for attempt in ledger.attempts] == ["failed", "ended"]
    assert ledger.attempts[0].attempt.world_size == 2
    assert told.problem.startswith("1 of ")
    assert told.problem.endswith(f"lines could not be read: first at {first.path}:{len(first.lines)}")


def test_a_rank_that_raises_is_named_with_its_error(tmp_path: Path) -> None:
    Trace(tmp_path / "dump", 0, pid=1).steps(1, 10, 1.0).step_begins(11)
    raises = Trace(tmp_path / "dump", 1, pid=2).steps(1, 10, 1.0)
    raises.now_step = {"step": 11, "relative_step": 11}
    with raises.during("step", error="RuntimeError: boom"), raises.during("fwd_bwd", error="RuntimeError: boom"):
        raises.at += 0.5
    ledger, _ = imported(tmp_path / "home", tmp_path / "dump")
    assert ledger.failures == [{"attempt": 0, "rank": 1, "unseen_ranks": [], "category": None, "decision": ""}]
    member = ledger.attempts[0].views[1].member
    assert member.timeline.ended is not None
    assert member.timeline.ended.error == "RuntimeError: boom"
    assert seconds(ledger)["waste.unsaved_steps"] == 10.5


def test_an_error_that_training_survives_is_none(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "dump").span("checkpoint_load", 1, error="OSError: busy").span("checkpoint_load", 1)
    trace.steps(1, 3, 1.0).torn_down()
    assert imported(tmp_path / "home", tmp_path / "dump")[0].state == "ended"


def test_a_process_that_never_trained_nor_was_torn_down_has_failed(tmp_path: Path) -> None:
    Trace(tmp_path / "dump").span("torch_distributed_init", 1)
    assert imported(tmp_path / "home", tmp_path / "dump")[0].state == "failed"


def test_spans_it_does_not_know_are_shown_and_not_counted(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "dump").span("warm caches ☕", 2).steps(1, 4, 1.0)
    trace.span("eval", 3, tid=8).torn_down()
    ledger, _ = imported(tmp_path / "home", tmp_path / "dump")
    assert {"warm caches ☕", "fwd_bwd", "eval"} <= set(shown(ledger))
    assert stages(ledger) == {"other": 2}
    assert Bucket.WASTE_EVALUATION not in seconds(ledger), "a thread beside the training takes none of its time"


def test_lines_out_of_order_give_the_same_ledger(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "dump").span("model_parallelism_init", 3).steps(1, 30, 1.0, data=0.5, save=0.25)
    trace.torn_down(1.0)
    straight, _ = imported(tmp_path / "home", tmp_path / "dump")
    chance = random.Random(7)
    places = [at + chance.uniform(0, 200) for at in range(len(trace.lines))]
    shuffled = [line for _, line in sorted(zip(places, trace.lines, strict=True))]
    assert shuffled != trace.lines
    trace.path.write_text("\n".join(shuffled))
    crooked, told = imported(tmp_path / "home", tmp_path / "dump", job="shuffled")
    assert crooked.buckets == straight.buckets
    assert (told.processes, told.problem) == (1, "")


def test_lines_that_came_twice_count_once(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "dump").span("checkpoint_load", 3).steps(1, 30, 1.0, data=0.5, save=0.25).torn_down(1.0)
    straight, _ = imported(tmp_path / "home", tmp_path / "dump")
    at = len(trace.lines) // 2
    trace.path.write_text("\n".join([line for line in trace.lines[:at] for _ in (1, 2)] + trace.lines[at - 50 :]))
    doubled, told = imported(tmp_path / "home", tmp_path / "dump", job="doubled")
    assert doubled.buckets == straight.buckets
    assert (told.processes, told.steps) == (1, 30)


def test_a_missing_line_costs_no_more_than_itself(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "dump").span("torch_distributed_init", 2).span("checkpoint_load", 1)
    trace.steps(1, 20, 1.0, data=0.25, save=0.5).torn_down(1.0)
    whole, _ = imported(tmp_path / "home", tmp_path / "dump", job="whole")
    for at in range(1, len(trace.lines)):
        trace.path.write_text("\n".join([*trace.lines[:at], "{damaged", *trace.lines[at + 1 :]]))
        ledger, told = imported(tmp_path / "home", tmp_path / "dump", job=f"without {at}")
        assert told.problem == f"1 of {len(trace.lines)} lines could not be read: first at {trace.path}:{at + 1}"
        for key in Bucket:
            off = abs(ledger.buckets[key] - whole.buckets[key]) / 1e9
            assert off <= 2.0, (at, trace.lines[at], key)
        assert told.steps == 20


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happened_to_the_lines_the_sums_hold(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    for rank in (0, 1):
        trace = Trace(tmp_path / "dump", rank, pid=rank).span("torch_distributed_init", 2).span("checkpoint_load", 1)
        trace.steps(1, 9, 1.0, data=0.25).step(10, 1.0, save=3.0).span("eval", 2, tid=9).steps(11, 15, 1.0)
        lines = list(trace.torn_down(1.0).lines)
        for _ in range(chance.randrange(1, 30)):
            at, other = chance.randrange(len(lines)), chance.randrange(len(lines))
            match chance.randrange(5):
                case 0:
                    del lines[at]
                case 1:
                    lines.insert(other, lines[at])
                case 2:
                    lines[at], lines[other] = lines[other], lines[at]
                case 3:
                    lines[at] = lines[at][: chance.randrange(len(lines[at]) + 1)]
                case 4:
                    fields = json.loads(lines[at]) if lines[at].endswith("}") else {}
                    lines[at] = json.dumps(fields | {chance.choice(["step", "time_us", "tid", "seq_id"]): 1})
        trace.path.write_text("\n".join(lines))
    imported(tmp_path / "home", tmp_path / "dump")


def test_what_is_set_on_the_wall_clock_changes_nothing(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "dump").steps(1, 10, 1.0)
    trace.clock_ahead = -3600
    trace.steps(11, 20, 1.0).span("eval", 1, tid=8)
    trace.clock_ahead = 7200
    trace.steps(21, 30, 1.0).torn_down()
    ledger, _ = imported(tmp_path / "home", tmp_path / "dump")
    assert seconds(ledger) == {"training.effective": 30.0, "unattributed": 1.0}


def test_hosts_whose_clocks_disagree_are_put_right_by_the_process_group(tmp_path: Path) -> None:
    for rank, ahead in ((0, 0.0), (1, 90.0)):
        trace = Trace(tmp_path / "dump", rank, pid=5, host=f"node-{rank}", at=ahead)
        trace.span("torch_distributed_init", 2).steps(1, 10, 1.0).torn_down()
    ledger, _ = imported(tmp_path / "home", tmp_path / "dump")
    assert len(ledger.attempts) == 1
    assert seconds(ledger) == {"start.trainer_init": 2.0, "training.effective": 10.0}


def test_the_step_for_which_there_was_no_data_is_none(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "dump").steps(1, 10, 1.0)
    trace.now_step = {"step": 11, "relative_step": 11}
    with trace.during("step"):
        trace.span("fetching_batch", 2, error="DataloaderExhaustedError: ")
    trace.torn_down(1.0)
    ledger, told = imported(tmp_path / "home", tmp_path / "dump")
    assert told.steps == 10
    assert seconds(ledger) == {"training.effective": 10.0, "shutdown.teardown": 3.0}


def test_killed_while_it_waited_for_data_is_a_wait(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "dump").steps(1, 10, 1.0)
    trace.now_step = {"step": 11}
    trace.line("step_start")
    trace.line("fetching_batch_start")
    trace.at += 4
    trace.moment("still here", tid=9)
    ledger, _ = imported(tmp_path / "home", tmp_path / "dump")
    assert seconds(ledger) == {"waste.unsaved_steps": 10.0, "waste.data_wait": 4.0}


def test_a_restart_without_a_checkpoint_trains_all_over(tmp_path: Path) -> None:
    Trace(tmp_path / "dump", pid=1).steps(1, 10, 1.0).step_begins(11)
    Trace(tmp_path / "dump", pid=2, at=20).steps(1, 15, 1.0).torn_down()
    ledger, _ = imported(tmp_path / "home", tmp_path / "dump")
    assert seconds(ledger) == {"training.effective": 15.0, "waste.repeated_steps": 10.0, "recover.detection": 10.0}


def test_a_job_that_comes_back_smaller_misses_nobody(tmp_path: Path) -> None:
    for rank in range(4):
        Trace(tmp_path / "dump", rank, pid=10 + rank).steps(1, 10, 1.0).step_begins(11)
    for rank in range(2):
        Trace(tmp_path / "dump", rank, pid=20 + rank, at=20).steps(11, 20, 1.0, loaded=10).torn_down()
    ledger, _ = imported(tmp_path / "home", tmp_path / "dump")
    assert [attempt.attempt.world_size for attempt in ledger.attempts] == [4, 2]
    assert not [note for note in ledger.notes if "no journal" in note]


def in_columns(line: str) -> str:
    """A line as commits of torchtitan before release 0.3 wrote it."""
    found = {key: value for key, value in json.loads(line).items() if value is not None}
    found = {key: value for key, value in found.items() if key not in ("global_rank", "relative_step")}
    kinds = {"int": int, "normal": str, "double": float, "normvector": list}
    return json.dumps({name: {k: v for k, v in found.items() if type(v) is kind} for name, kind in kinds.items()})


def test_the_older_format_with_a_restart_in_the_same_file(tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    first = Trace(dump, pid=100).steps(1, 10, 1.0).step_begins(11)
    again = Trace(dump, pid=100, at=20, file="again.jsonl").steps(6, 20, 1.0).torn_down()
    logs = dump / "system_logs"
    logs.mkdir()
    lines = map(in_columns, [*first.lines, *again.lines])
    (logs / "training_rank_0_system.jsonl").write_text("\n".join(lines))
    for path in (first.path, again.path):
        path.unlink()
    ledger, told = imported(tmp_path / "home", dump)
    assert (told.processes, told.problem) == (2, "")
    assert seconds(ledger) == {"training.effective": 20.0, "waste.repeated_steps": 5.0, "recover.detection": 10.0}


def test_a_forked_child_that_writes_to_the_same_file_is_no_restart(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "dump").span("torch_distributed_init", 1).steps(1, 20, 1.0)
    trace.span("tokenize", 1.0, pid=999, tid=999).steps(21, 40, 1.0).torn_down()
    ledger, told = imported(tmp_path / "home", tmp_path / "dump")
    assert (told.processes, told.steps, ledger.state) == (1, 40, "ended")


@pytest.mark.thorough
def test_thousands_of_steps_take_little_room_and_little_memory(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "dump").step(1, 0.5)
    pattern, lines = trace.lines[1:], [trace.lines[0]]
    for number in range(1, 5001):
        for at, line in enumerate(pattern):
            fields = json.loads(line)
            fields |= {"step": number, "seq_id": len(lines), "time_us": fields["time_us"] + 500_000 * (number - 1)}
            fields["relative_step"] = number
            lines.append(json.dumps(fields | ({"delta_ms": 0.02} if at == 0 else {})))
    trace.path.write_text("\n".join(lines))
    tracemalloc.start()
    try:
        ledger, told = imported(tmp_path / "home", tmp_path / "dump")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert told.steps == 5000
    assert told.spans_left_out > 5000
    assert seconds(ledger) == {"training.effective": 2500.0}
    assert sum(file.stat().st_size for file in (tmp_path / "home").rglob("*.hwj")) < 12_000
    assert trace.path.stat().st_size > 15_000_000
    assert peak_bytes < 4_000_000


def test_the_spans_of_a_slow_step_are_kept(tmp_path: Path) -> None:
    Trace(tmp_path / "dump").steps(1, 50, 1.0).step(51, 30.0).steps(52, 60, 1.0).torn_down()
    ledger, _ = imported(tmp_path / "home", tmp_path / "dump")
    bars = [bar for view in ledger.attempts[0].views.values() for bar in view.member.timeline.bars()]
    assert [bar for bar in bars if bar.name == "fwd_bwd" and (bar.end_ns or 0) - bar.begin_ns == 30_000_000_000]


def test_other_sources_are_no_ranks(tmp_path: Path) -> None:
    Trace(tmp_path / "dump", 0, pid=1, source="trainer").steps(1, 10, 1.0).torn_down()
    Trace(tmp_path / "dump", 0, pid=2, source="generator").span("generate", 40)
    ledger, told = imported(tmp_path / "home", tmp_path / "dump")
    assert seconds(ledger) == {"training.effective": 10.0}
    assert (told.processes, ledger.ranks) == (2, [0])
    Trace(tmp_path / "others", 0, pid=1, source="generator").span("generate", 40)
    Trace(tmp_path / "others", 0, pid=2, source="controller").span("setup", 40)
    with pytest.raises(InputError, match="controller, generator"):
        import_traces([tmp_path / "others"], tmp_path / "home")


def test_how_long_it_lived_is_told_by_its_last_line(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "dump").steps(1, 3, 1.0)
    trace.at += 10
    trace.moment("metric_value", value=1.0)
    ledger, _ = imported(tmp_path / "home", tmp_path / "dump")
    assert ledger.wall_ns == 13_000_000_000
    marks = [mark.name for mark in ledger.attempts[0].views[0].member.timeline.marks if isinstance(mark, Mark)]
    assert marks == ["structured_logger_started", "trace ends"]


# --- what is given -------------------------------------------------------------------------------------------------


def residue(home: Path) -> list[Path]:
    return [path for path in home.rglob("*") if path.name != "jobs"] if home.exists() else []


def test_a_dump_folder_its_logs_and_its_files_are_the_same_job(tmp_path: Path) -> None:
    dump = tmp_path / "outputs"
    path = Trace(dump).steps(1, 3, 1.0).path
    for number, given in enumerate(([tmp_path], [dump], [path.parent], [path, path.parent / ".." / path.parent.name])):
        told = import_traces(given, tmp_path / f"home-{number}")
        assert (told.job, told.processes) == ("outputs", 1)


def test_a_folder_with_two_jobs_is_refused_and_both_can_be_named(tmp_path: Path) -> None:
    Trace(tmp_path / "runs" / "a", pid=1).steps(1, 3, 1.0).step_begins(4)
    Trace(tmp_path / "runs" / "b", pid=2, at=60).steps(1, 3, 1.0).torn_down()
    with pytest.raises(InputError, match=r"traces of 2 jobs: .*a/structured_logs, .*b/structured_logs"):
        import_traces([tmp_path / "runs"], tmp_path / "home")
    ledger, _ = imported(tmp_path / "home", tmp_path / "runs" / "a", tmp_path / "runs" / "b")
    assert len(ledger.attempts) == 2


@pytest.mark.parametrize("text", ['{"loss": 2.5}\n' * 50, "not json\n", "\0" * 4096, "[" * 100_000 + "\n", "1\n"])
def test_a_file_that_is_not_torchtitans_is_named(tmp_path: Path, text: str) -> None:
    foreign = tmp_path / "metrics.jsonl"
    foreign.write_text(text)
    good = Trace(tmp_path / "dump").steps(1, 3, 1.0).path
    with pytest.raises(InputError, match=r"metrics\.jsonl is not a trace of torchtitan's"):
        import_traces([good, foreign], tmp_path / "home")
    assert residue(tmp_path / "home") == []


@pytest.mark.parametrize("field", ["time_us", "log_type_name", "rank", "step", "pid", "seq_id"])
@pytest.mark.parametrize("value", ["a word", [], {}, -1, 1 << 70, 1.5e300])
def test_a_line_with_a_senseless_field_does_no_harm(tmp_path: Path, field: str, value: object) -> None:
    trace = Trace(tmp_path / "dump").steps(1, 3, 1.0)
    fields = json.loads(trace.lines[-2]) | {field: value}
    if field == "rank":
        fields["global_rank"] = value
    trace.lines[-2] = json.dumps(fields)
    trace.torn_down()
    ledger, told = imported(tmp_path / "home", tmp_path / "dump")
    assert told.damage.unreadable == (0 if (field, value) == ("log_type_name", "a word") else 1)
    assert round(ledger.wall_ns / 1e9) == 3


def test_an_empty_file_and_one_cut_in_its_first_line_are_passed_over(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "dump", 0, pid=1).steps(1, 3, 1.0)
    Trace(tmp_path / "dump", 1, pid=2).path.write_text("")
    Trace(tmp_path / "dump", 2, pid=3).path.write_text(trace.lines[0][:50])
    _, told = imported(tmp_path / "home", tmp_path / "dump")
    assert told.ranks == {0}
    assert told.damage.unreadable == 1


def test_without_a_readable_line_there_is_nothing_to_import(tmp_path: Path) -> None:
    Trace(tmp_path / "dump").path.write_text("")
    with pytest.raises(InputError, match="nothing to import"):
        import_traces([tmp_path / "dump"], tmp_path / "home")
    with pytest.raises(InputError, match="does not exist"):
        import_traces([tmp_path / "nowhere"], tmp_path / "home")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no traces"):
        import_traces([tmp_path / "empty"], tmp_path / "home")
    assert residue(tmp_path / "home") == []


def test_a_job_of_that_name_is_not_touched(tmp_path: Path) -> None:
    Trace(tmp_path / "dump").steps(1, 3, 1.0)
    import_traces([tmp_path / "dump"], tmp_path / "home")
    before = {path: path.stat().st_mtime_ns for path in residue(tmp_path / "home")}
    with pytest.raises(InputError, match=r"already, .*--job NAME, or remove"):
        import_traces([tmp_path / "dump"], tmp_path / "home")
    assert {path: path.stat().st_mtime_ns for path in residue(tmp_path / "home")} == before


def test_an_import_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    Trace(tmp_path / "dump", 0, pid=1).steps(1, 3, 1.0)
    mixed = Trace(tmp_path / "dump", 1, pid=2, at=1).steps(1, 3, 1.0)
    other = Trace(tmp_path / "elsewhere", 5, pid=3).steps(1, 3, 1.0)
    mixed.path.write_text("\n".join([*mixed.lines, *other.lines]))
    with pytest.raises(InputError, match=r"lines of training rank 1 and of training rank 5"):
        import_traces([tmp_path / "dump"], tmp_path / "home")
    assert residue(tmp_path / "home") == []


def test_the_same_process_in_two_files_is_refused(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "dump").steps(1, 3, 1.0)
    (trace.path.parent / "copy.jsonl").write_text(trace.path.read_text())
    with pytest.raises(InputError, match="a copy"):
        import_traces([tmp_path / "dump"], tmp_path / "home")
    assert residue(tmp_path / "home") == []


def test_a_home_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    Trace(tmp_path / "dump").steps(1, 3, 1.0)
    (tmp_path / "home").write_text("a file, and no folder")
    with pytest.raises(PlatformError, match=r"home cannot be written .* nothing was imported"):
        import_traces([tmp_path / "dump"], tmp_path / "home")


@pytest.mark.needs("mount")
def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "dump")
    fields = json.loads(trace.lines[0])
    lines = [json.dumps(fields | {"log_type_name": f"moment {seq}", "seq_id": seq}) for seq in range(4000)]
    trace.path.write_text("\n".join(lines))
    home = tmp_path / "home"
    home.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(home)], capture_output=True).returncode:
        pytest.skip("needs mount: run as root, where mounting a tmpfs is allowed")
    try:
        with pytest.raises(PlatformError, match="no space left"):
            import_traces([tmp_path / "dump"], home)
        assert residue(home) == []
    finally:
        subprocess.run(["umount", "--lazy", str(home)], check=True)


def test_the_command_says_once_what_it_could_not_read(home: Path, tmp_path: Path) -> None:
    trace = Trace(tmp_path / "dump").steps(1, 40, 1.0).torn_down()
    trace.lines[5] = trace.lines[9] = "?"
    trace.path.write_text("\n".join(trace.lines))
    said = headway("import", "torchtitan", str(tmp_path / "dump"), "--job", "mine", errors=True)
    assert said == f"headway: 2 of {len(trace.lines)} lines could not be read: first at {trace.path}:6\n"
    assert "there is a job 'mine' already" in headway("import", "torchtitan", str(tmp_path), "--job", "mine", code=1)


# --- torchtitan itself ---------------------------------------------------------------------------------------------

needs_torchtitan = pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None, reason="needs torchtitan: pip install --no-deps torchtitan==0.3.0"
)
JOB = Path(__file__).parent / "titan_job.py"


def titan(folder: Path, rank: int, *words: str) -> "subprocess.Popen[bytes]":
    environ = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    return warm.Popen([sys.executable, str(JOB), str(folder), *words], env=environ, stderr=subprocess.PIPE)


@needs_torchtitan
def test_traces_of_torchtitans_own_logger_killed_and_resumed(tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    for words in (["0", "18", "kill"], ["15", "30"]):
        for rank in [titan(dump, number, *words) for number in (0, 1)]:
            _, errors = rank.communicate(timeout=120)
            assert rank.returncode == (-9 if "kill" in words else 0), errors
    ledger, told = imported(tmp_path / "home", dump)
    assert (told.processes, told.ranks, told.steps, told.problem) == (4, {0, 1}, 2 * (17 + 15), "")
    assert [attempt.outcome for attempt in ledger.attempts] == ["failed", "ended"]
    assert [round(steps) for steps in ledger.steps.values()] == [30, 2, 0]
    for rank in (0, 1):
        spent = by_bucket(ledger.rank_sums(rank))
        saves = durations(dump, rank, "checkpoint_save")  # of every step; those that save nothing end at once
        real_ns, all_ns = (sum(took for took, line in saves if tag in str(line)) for tag in ("step_tags", ""))
        assert real_ns <= spent[Bucket.WASTE_CHECKPOINT_BLOCKING] <= all_ns
        waits = [took for took, line in durations(dump, rank, "fetching_batch") if line["relative_step"] > 1]
        assert spent[Bucket.WASTE_DATA_WAIT] == sum(waits)
        assert spent[Bucket.RECOVER_CHECKPOINT_RESTORE] == durations(dump, rank, "checkpoint_load")[1][0]
        assert spent[Bucket.TRAINING_EFFECTIVE] > 0.02e9 * 28
        assert spent[Bucket.WASTE_REPEATED_STEPS] > 0.02e9
    assert stages(ledger)["train_module_creation"] >= 0.06


def durations(dump: Path, rank: int, name: str) -> list[tuple[int, dict[str, Any]]]:
    """How long each span of that name took, by the times of its lines, with the last of them."""
    found, begun_us = [], 0
    for path in sorted(dump.glob(f"structured_logs/*_rank_{rank}.*"), key=lambda path: path.name):
        for line in map(json.loads, path.read_text().splitlines()):
            if line["log_type_name"] == f"{name}_start":
                begun_us = line["time_us"]
            elif line["log_type_name"] == f"{name}_end":
                found.append(((line["time_us"] - begun_us) * 1000, line))
    return found


@needs_torchtitan
def test_an_exception_in_torchtitans_own_span_is_the_failure(tmp_path: Path) -> None:
    job = titan(tmp_path / "dump", 0, "0", "4", "raise")
    job.communicate(timeout=120)
    assert job.returncode == 1
    ledger, _ = imported(tmp_path / "home", tmp_path / "dump")
    ended = ledger.attempts[0].views[0].member.timeline.ended
    assert ended is not None
    assert ended.error == "RuntimeError: boom"
    assert ledger.state == "failed"

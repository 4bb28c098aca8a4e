"""What saving and restoring a training state takes: headway next to torch, to three libraries, and to the floors.

The state is 1.06 GB in 240 tensors. The floors are a copy of the same tensors into memory that is there already, and a
write of the same bytes past the page cache with an fsync. Every process is a session: it measures a floor and a save in
turns. Sessions of headway and of the peers take turns as well. `savers.py` is what runs in them.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.measure import Row, short

WIDTH, QUICK_WIDTH = 1051, 260
"""Of the layers: for 1.06 GB, and for 65 MB."""
PATIENCE_S = 180.0
GB = 1e9
OURS, PROCESS = "headway", "dcp.async_save, process, one stager"
PEERS = (
    "torch.save + fsync", "dcp.save", "dcp.async_save, thread", "dcp.async_save, thread, one stager", PROCESS,
    "torch_checkpointing", "torchsnapshot", "dlrover",
)  # fmt: skip
"""As `savers.py` calls them, which imports torch, and this side of it does not."""

Told = dict[str, Any]
Samples = dict[str, list[float]]


class Stuck(RuntimeError):
    """A session did not end well."""

    @property
    def why(self) -> str:
        """In one line: the first error that it shows."""
        lines = str(self).splitlines()
        return next((line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)), lines[-1])


def run(quick: bool) -> list[Row]:
    """The rows on checkpoints."""
    bench = Bench(QUICK_WIDTH if quick else WIDTH, steps_s=0.1 if quick else 1.0)
    rounds = 1 if quick else 20
    with bench:
        print(f"  in {bench.folder} ({bench.file_system()}), {rounds} sessions of ours", flush=True)
        taken, left_out = bench.sessions(rounds, peer_sessions=1 if quick else 2)
        sharded = bench.sharded(1 if quick else 7, 1 if quick else 3)
        rows = [
            *_saving_rows(taken, left_out, bench.bytes, ""),
            *_saving_rows(*sharded, bench.bytes, ", two FSDP2 ranks"),
            *bench.restore_rows(1 if quick else 10),
            *bench.memory_rows(),
        ]
    if quick:  # of a small state, what does not grow with it is most
        rows = [replace(row, at_most=None, times=None) for row in rows]
    return rows


class Bench:
    """A folder on a real disk, and the processes that save to it."""

    def __init__(self, width: int, steps_s: float) -> None:
        self._width, self._steps_s, self.bytes = width, steps_s, 0
        self.folder = Path()

    def __enter__(self) -> "Bench":
        # The temporary folder may be in memory; `out` is where the results go, too.
        Path("out").mkdir(exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir="out")).absolute()
        return self

    def __exit__(self, *problem: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def file_system(self) -> str:
        """Of the folder."""
        told = subprocess.run(["df", "--output=fstype", self.folder], capture_output=True, text=True, check=False)
        return told.stdout.split()[-1] if told.stdout else "an unknown file system"

    # --- processes ---

    @contextmanager
    def _process(self, place: Path, ranks: int = 1, **told: Any) -> Iterator[Told]:
        """What a session answers; ended, with all that it started, when this is left."""
        answer = place / "answer"
        answer.unlink(missing_ok=True)
        told |= {"width": self._width, "folder": str(place), "answer": str(answer), "ranks": ranks}
        port = _free_port()
        with open(place / "log", "wb") as log:
            started = [
                subprocess.Popen(
                    [sys.executable, "-m", "bench.savers", json.dumps(told)],
                    stdout=log, stderr=log, env=_environ(rank, ranks, port), start_new_session=True,
                )
                for rank in range(ranks)
            ]  # fmt: skip
        try:
            yield _answer(answer, started, place / "log")
            if not told.get("stays"):
                for process in started:
                    process.wait(PATIENCE_S)
        finally:
            for process in started:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                _sweep(process.pid)

    @contextmanager
    def _place(self) -> Iterator[Path]:
        place = Path(tempfile.mkdtemp(dir=self.folder))
        try:
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def _saving(self, saver: str, later: int, ranks: int = 1) -> Samples:
        told = {"role": "saving", "saver": saver, "later": later, "beside": 1, "steps_s": self._steps_s}
        with self._place() as place, self._process(place, ranks, **told) as answer:
            self.bytes = self.bytes or answer["bytes"] * ranks
        samples: Samples = answer["samples"]
        return samples

    # --- saving ---

    def sessions(self, rounds: int, peer_sessions: int) -> tuple[dict[str, Samples], dict[str, str]]:
        """Samples of everyone, and why some have none."""
        peers = PEERS * peer_sessions
        taken, left_out = dict[str, Samples](), dict[str, str]()
        for number in range(max(rounds, len(peers))):
            for saver in (*((OURS,) if number < rounds else ()), *peers[number : number + 1]):
                self._take(taken, left_out, saver, later=1 if saver == OURS else 2)
        return taken, {saver: why for saver, why in left_out.items() if saver not in taken}

    def _take(
        self, taken: dict[str, Samples], left_out: dict[str, str], saver: str, later: int = 1, ranks: int = 1
    ) -> None:
        try:
            found = self._saving(saver, later, ranks)
        except Stuck as problem:
            if saver == OURS:
                raise
            left_out[saver] = problem.why
            print(f"  {saver} did not run: {problem.why}", flush=True)
            return
        _join(taken.setdefault(saver, {}), found)
        print(f"  {saver}: blocked {short(found['blocked'][-1])} s, copy {short(found['copy'][-1])} s", flush=True)

    def sharded(self, sessions: int, later: int) -> tuple[dict[str, Samples], dict[str, str]]:
        """The same with two ranks that share every tensor, next to dcp's process mode."""
        taken, left_out = dict[str, Samples](), dict[str, str]()
        for number in range(sessions):
            self._take(taken, left_out, OURS, later, ranks=2)
            if number < 2:
                self._take(taken, left_out, PROCESS, later, ranks=2)
        return taken, {saver: why for saver, why in left_out.items() if saver not in taken}

    # --- restoring ---

    def restore_rows(self, rounds: int) -> list[Row]:
        """After a kill, from memory; and from the disk."""
        rows = []
        for ranks in (1, 2):
            with self._place() as place:
                found = self._restored(place, ranks, rounds if ranks == 1 else (rounds + 1) // 2)
                rows += _restore_rows(found, ", two FSDP2 ranks" if ranks > 1 else "")
                if ranks == 1:
                    with self._process(place, role="reading", rounds=2 + rounds // 3) as answer:
                        _check(answer, found["sums"])
                    rows += _ladder_rows(answer["samples"])
        return rows

    def _restored(self, place: Path, ranks: int, rounds: int) -> Told:
        """Each process restores what the one before it, which was killed, has left."""
        with self._process(place, ranks, role="holding", stays=True) as answer:
            sums = answer["sums"]
        ready, fresh = dict[str, list[float]](), dict[str, list[float]]()
        for number in range(2 * rounds):
            is_last, has_moments = number == 2 * rounds - 1, number % 2 == 0
            role = {"role": "restoring", "has_moments": has_moments, "stays": not is_last, "closes": is_last}
            with self._process(place, ranks, **role) as answer:
                _check(answer, sums)
                if answer["tier"] != "memory":
                    raise Stuck(f"restored from {answer['tier'] or 'nothing'} after a kill, and not from memory")
            _join(ready if has_moments else fresh, answer["samples"])
        return {"ready": ready, "fresh": fresh, "sums": sums}

    # --- memory ---

    def memory_rows(self) -> list[Row]:
        """Peak memory beside the state, for each mode."""
        bound = self.bytes // 4 // 4096 * 4096
        modes = {"two-slot": 2.0, "one-slot": 1.0, "streaming": bound / self.bytes}
        rows = []
        for mode, most in modes.items():
            with self._place() as place:
                options = {"stream_bytes": bound} if mode == "streaming" else {}
                with self._process(place, role="memory", memory=mode, **options) as told:
                    pass
            if told["mode"] != mode:
                raise Stuck(f"asked for {mode}, got {told['mode']}")
            note = f"and {told['anonymous'] / 1e6:.0f} MB of the processes' own"
            # To two digits: what stands between the tensors in the file is in memory, too.
            share, bar = round(told["memfd"] / told["bytes"], 2), round(most, 2)
            rows.append(Row(f"memory, {mode}", "× state", [share], at_most=bar, note=note))
        return rows


def _environ(rank: int, ranks: int, port: int) -> dict[str, str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("HEADWAY_", "TORCHELASTIC"))}
    environ["HEADWAY_DISABLE"] = "1"
    if ranks > 1:
        environ |= {
            "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
    return environ


def _sweep(pid: int) -> None:
    """Removes what dlrover leaves behind."""
    for memory in Path("/dev/shm").glob(f"*bench-{pid}*"):
        memory.unlink(missing_ok=True)
    shutil.rmtree(f"/tmp/ckpt_sock/bench-{pid}", ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _answer(path: Path, started: list[subprocess.Popen[bytes]], log: Path) -> Told:
    until = time.monotonic() + PATIENCE_S
    while not path.exists():
        failed = [process for process in started if process.poll()]
        if failed or time.monotonic() > until:
            lines = log.read_text(errors="replace").splitlines()
            raise Stuck("\n".join(lines[-40:]) or "no word from it" if failed else f"no answer in {PATIENCE_S:.0f} s")
        time.sleep(0.02)
    told: Told = json.loads(path.read_text())
    return told


def _join(all_samples: Samples, more: Samples) -> None:
    for name, samples in more.items():
        all_samples.setdefault(name, []).extend(samples)


def _check(answer: Told, sums: list[float]) -> None:
    if answer["sums"] != sums:
        raise Stuck("what was restored is not what was saved")


# --- rows ------------------------------------------------------------------------------------------------------------


def _ratios(samples: Samples, name: str, floor: str) -> list[float]:
    return [took / least for took, least in zip(samples[name], samples[floor], strict=True)]


def _saving_rows(taken: dict[str, Samples], left_out: dict[str, str], size: int, where: str) -> list[Row]:
    bars = (
        ("first save blocks", "first blocked", "first copy", "× memcpy", 1.5),
        ("later saves block", "blocked", "copy", "× memcpy", 1.1),
        ("from save() to durable", "durable", "disk", "× O_DIRECT", 1.5),
    )
    ours, rows = taken[OURS], []
    for name, what, floor, unit, bar in bars:
        note = f"{_ms(ours[what])} next to {_ms(ours[floor])}, {len(ours[what])} pairs"
        if left_out:
            note += "; left out: " + "; ".join(f"{peer} ({why})" for peer, why in left_out.items())
        rows.append(Row(name + where, unit, _ratios(ours, what, floor), at_most=bar, note=note))
        for peer, samples in taken.items():
            if peer != OURS:
                rows.append(Row("…", unit, _ratios(ours, what, floor), _ratios(samples, what, floor), peer))
    rows += _cost_rows(taken, size, where)
    return rows


def _cost_rows(taken: dict[str, Samples], size: int, where: str) -> list[Row]:
    """What saves take from the machine and from training."""
    cpu = {saver: [took * GB / size for took in samples["cpu"]] for saver, samples in taken.items()}
    lost = {saver: [1000 * took for took in samples["lost"]] for saver, samples in taken.items()}
    rows = [Row(f"CPU in the background{where}", "s/GB", cpu.pop(OURS), at_most=0.35)]
    rows += [Row("…", "s/GB", rows[0].ours, theirs, peer) for peer, theirs in cpu.items()]
    ours = lost.pop(OURS)
    for peer, theirs in lost.items():
        bar = 4.0 if peer == PROCESS else None
        name = f"training time lost to a save{where}" if peer == PROCESS else "… training time lost"
        rows.append(Row(name, "ms", ours, theirs, peer, times=bar))
    return rows


def _restore_rows(found: Told, where: str) -> list[Row]:
    ready, fresh = found["ready"], found["fresh"]
    notes = [f"{_ms(each['restore'])} next to {_ms(each['copy'])}" for each in (ready, fresh)]
    taken = [_ratios(each, "restore", "copy") for each in (ready, fresh)]
    return [
        Row(f"restore after SIGKILL{where}", "× memcpy", taken[0], at_most=1.2, note=notes[0]),
        Row(f"… with an optimizer that never stepped{where}", "× memcpy", taken[1], note=notes[1]),
    ]


def _ladder_rows(samples: Samples) -> list[Row]:
    copy = median(samples["copy"])
    cold = [took / copy for took in samples["disk, not in the page cache"]]
    warm, theirs = _ratios(samples, "disk", "copy"), _ratios(samples, "dcp", "copy")
    return [
        Row("restore from the disk, hashes verified", "× memcpy", warm, theirs, "dcp.load", note=_ms(samples["disk"])),
        Row("… not in the page cache", "× memcpy", cold, note=_ms(samples["disk, not in the page cache"])),
    ]


def _ms(seconds: list[float]) -> str:
    return f"{1000 * median(seconds):,.0f} ms"

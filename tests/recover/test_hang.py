"""Made-up dumps in, findings out: who is stuck, in which collective, where."""

from dataclasses import dataclass
from typing import Any

from headway.recover.hang import call_in, explain, threads_in

TORCH = "/env/lib/python3.11/site-packages/torch"
LIB = "/usr/lib/python3.11"


@dataclass(frozen=True)
class Dump:
    flight: list[dict[str, Any]] | None = None
    stacks: str = ""
    state: str = ""


def entry(
    name: str, number: int, *, ends: bool = True, group: str = "0", ranks: list[int] | None = None, size: int = 3
) -> dict[str, Any]:
    return {
        "process_group": [group, "default_pg" if group == "0" else f"mesh_{group}"],
        "collective_seq_id": number,
        "p2p_seq_id": number,
        "profiling_name": f"nccl:{name}",
        "input_sizes": [[size]],
        "state": "completed" if ends else "started",
        "retired": False,
        "is_p2p": "->" in name or "<-" in name,
        "ranks": ranks,
    }


def stack(*frames: tuple[str, int, str, str]) -> str:
    """One thread; frames are (file, line, function, source), innermost first."""
    lines = ["Current thread 0x00007f0000000001 (most recent call first):"]
    for file, line, function, source in frames:
        lines += [f'  File "{file}", line {line} in {function}', *([f"    {source}"] if source else [])]
    return "\n".join(lines)


USER = ("/job/train.py", 30, "step", "total = reduce(loss)")
MAIN = ("/job/train.py", 90, "<module>", "main()")
C10D = f"{TORCH}/distributed/distributed_c10d.py"
WRAPPER = (f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper", "")
IN_ALL_REDUCE = stack((C10D, 3252, "all_reduce", "work.wait()"), WRAPPER, USER, MAIN)
IN_BARRIER = stack((C10D, 5000, "barrier", "work.wait()"), WRAPPER, USER, MAIN)
IN_BACKWARD = stack(
    (f"{TORCH}/autograd/graph.py", 829, "_engine_run_backward", ""),
    (f"{TORCH}/_tensor.py", 648, "backward", ""),
    ("/job/train.py", 31, "step", "loss.backward()"),
)
SLEEPS = stack(("/job/data.py", 7, "fetch", "time.sleep(60)"), MAIN)


# --- by the Flight Recorder ------------------------------------------------------------------------------------------


def test_the_rank_that_did_not_enter_is_stuck_and_its_line_is_named() -> None:
    waits = Dump([entry("all_reduce", 4), entry("all_reduce", 5, ends=False)], IN_ALL_REDUCE)
    finding = explain({0: waits, 1: Dump([entry("all_reduce", 4)], SLEEPS), 2: waits})
    assert (finding.kind, finding.stuck_ranks, finding.collective) == ("missing_rank", (1,), "all_reduce")
    assert finding.where == "/job/data.py:7 in fetch: time.sleep(60)"
    assert finding.text.splitlines() == [
        "rank 1 is missing from all_reduce of [3] (number 5 of group default_pg), in which ranks 0, 2 are waiting.",
        "  rank 1: sleeps at /job/data.py:7 in fetch: time.sleep(60)",
        "  ranks 0, 2: in all_reduce at /job/train.py:30 in step: total = reduce(loss)",
    ]


def test_a_rank_that_left_early_is_named_and_the_one_that_waits_for_it_is_stuck() -> None:
    waits = Dump([entry("all_reduce", 5, ends=False, ranks=[0, 1])], IN_ALL_REDUCE)
    for dump in (waits, Dump(None, IN_ALL_REDUCE), Dump(None, IN_BACKWARD)):
        finding = explain({1: dump}, left=[0])
        assert (finding.kind, finding.stuck_ranks) == ("left_early", (1,))
        assert finding.text.startswith("rank 0 has left, with exit code 0, while rank 1 is still waiting in ")


def test_a_rank_that_ended_well_is_not_blamed_for_one_that_is_stuck() -> None:
    waits = Dump([entry("all_reduce", 5, ends=False, ranks=[0, 1, 2])], IN_ALL_REDUCE)
    for dumps in ({1: Dump(None, SLEEPS)}, {1: Dump([], SLEEPS), 2: waits}):
        finding = explain(dumps, left=[0])
        assert finding.stuck_ranks == (1,)
        assert "rank 0 has left, with exit code 0" in finding.text
        assert "/job/data.py:7" in finding.where


def test_a_rank_whose_own_wait_is_for_another_rank_is_not_the_cause() -> None:
    dp = entry("all_reduce", 9, ends=False, group="dp", ranks=[0, 1])
    tp = entry("all_gather", 4, ends=False, group="tp", ranks=[1, 2])
    finding = explain({0: Dump([dp]), 1: Dump([tp]), 2: Dump([], SLEEPS)})
    assert (finding.kind, finding.stuck_ranks, finding.collective) == ("missing_rank", (2,), "all_gather")


def test_ranks_that_wait_for_each_other_in_two_groups_are_a_mismatch() -> None:
    dp = entry("all_reduce", 9, ends=False, group="dp", ranks=[0, 1])
    tp = entry("all_gather", 4, ends=False, group="tp", ranks=[0, 1])
    finding = explain({0: Dump([dp]), 1: Dump([tp])})
    assert (finding.kind, finding.stuck_ranks) == ("mismatch", (0, 1))
    assert finding.collective == "all_gather / all_reduce"


def test_the_first_number_that_differs_is_told_even_if_it_ended() -> None:
    told = [entry("all_reduce", 1), entry("broadcast", 2), entry("all_reduce", 3, ends=False)]
    other = [entry("all_reduce", 1), entry("all_reduce", 2), entry("barrier", 3, ends=False)]
    finding = explain({0: Dump(told), 1: Dump(told), 2: Dump(other)})
    assert (finding.kind, finding.stuck_ranks, finding.collective) == ("mismatch", (2,), "all_reduce / broadcast")


def test_sizes_that_must_agree_and_do_not_are_a_mismatch() -> None:
    dumps = {rank: Dump([entry("all_reduce", 1, ends=False, size=3 + rank)]) for rank in (0, 1)}
    assert explain(dumps).kind == "mismatch"
    assert "all_reduce of [3]" in explain(dumps).text
    assert "all_reduce of [4]" in explain(dumps).text


def test_sizes_that_may_differ_are_none() -> None:
    dumps = {rank: Dump([entry("all_gather", 1, ends=False, size=3 + rank)]) for rank in (0, 1)}
    assert explain(dumps).kind == "same_collective"


def test_all_in_the_same_collective_points_to_the_network_or_to_the_one_that_cannot_run() -> None:
    waits = [entry("all_reduce", 5, ends=False)]
    finding = explain({0: Dump(waits), 1: Dump(waits)})
    assert (finding.kind, finding.stuck_ranks) == ("same_collective", (0, 1))
    halted = explain({0: Dump(waits), 1: Dump(waits, state="is stopped")})
    assert (halted.kind, halted.stuck_ranks) == ("same_collective", (1,))
    assert "rank 1 cannot run" in halted.text


def test_a_group_of_which_a_node_sent_no_dumps_suspects_that_node() -> None:
    waits = Dump([entry("all_reduce", 5, ends=False, ranks=[0, 1, 2, 3])], IN_ALL_REDUCE)
    finding = explain({0: waits, 1: waits})
    assert (finding.kind, finding.stuck_ranks, finding.where) == ("missing_rank", (2, 3), "")
    assert "ranks 2-3: nothing is known" in finding.text


def test_a_known_absentee_is_rather_suspected_than_an_unknown_rank() -> None:
    waits = Dump([entry("all_reduce", 5, ends=False, ranks=[0, 1, 2])])
    assert explain({0: waits, 1: Dump([], SLEEPS)}).stuck_ranks == (1,)


def test_a_rank_without_flight_whose_stack_is_in_the_collective_did_enter() -> None:
    waits = Dump([entry("all_reduce", 5, ends=False, ranks=[0, 1, 2])])
    assert explain({0: waits, 1: Dump(None, IN_ALL_REDUCE), 2: Dump(None, SLEEPS)}).stuck_ranks == (2,)


def test_a_receive_waits_for_the_rank_at_its_other_end() -> None:
    receives = Dump([entry("recv 1<-0", 7, ends=False, group="pp", ranks=[4, 6])])
    finding = explain({6: receives, 4: Dump([], SLEEPS), 5: Dump([], SLEEPS)})
    assert (finding.kind, finding.stuck_ranks, finding.collective) == ("missing_rank", (4,), "recv 1<-0")


def test_a_thousand_ranks_are_told_in_few_lines() -> None:
    dumps = {rank: Dump([entry("all_reduce", 5, ends=False)], IN_ALL_REDUCE) for rank in range(1000)}
    finding = explain({**dumps, 613: Dump([], SLEEPS)})
    assert finding.stuck_ranks == (613,)
    assert "ranks 0-612, 614-999" in finding.text
    assert len(finding.text.splitlines()) == 3


# --- by stacks alone -------------------------------------------------------------------------------------------------


def test_stacks_alone_tell_who_did_not_enter() -> None:
    finding = explain({0: Dump(None, IN_ALL_REDUCE), 1: Dump(None, SLEEPS), 2: Dump(None, IN_ALL_REDUCE)})
    assert (finding.kind, finding.stuck_ranks, finding.collective) == ("missing_rank", (1,), "all_reduce")


def test_stacks_alone_tell_different_collectives() -> None:
    finding = explain({0: Dump(None, IN_ALL_REDUCE), 1: Dump(None, IN_BARRIER)})
    assert (finding.kind, finding.stuck_ranks, finding.collective) == ("mismatch", (0, 1), "all_reduce / barrier")


def test_ranks_in_backward_wait_for_the_one_that_is_not() -> None:
    finding = explain({0: Dump(None, IN_BACKWARD), 1: Dump(None, SLEEPS)})
    assert (finding.kind, finding.stuck_ranks, finding.collective) == ("missing_rank", (1,), "backward")
    assert explain({0: Dump(None, IN_BACKWARD)}).kind == "same_collective"


def test_a_collective_in_a_thread_behind_backward_counts() -> None:
    thread = IN_ALL_REDUCE.replace("Current thread", "Thread")
    assert call_in(thread + "\n\n" + IN_BACKWARD).collective == "all_reduce"
    assert call_in(thread + "\n\n" + SLEEPS).collective == ""


def test_what_ranks_wait_for_outside_collectives_is_named() -> None:
    loader = (f"{TORCH}/utils/data/dataloader.py", 700, "__next__", "data = self._next_data()")
    for frames, doing in {
        ((f"{LIB}/queue.py", 171, "get", ""), USER): "waits at a queue",
        ((f"{LIB}/multiprocessing/queues.py", 113, "get", ""), loader, USER): "waits for the data loader",
        (("/job/data.py", 5, "__getitem__", "return decode(image)"), loader, USER): "reads data",
        ((f"{LIB}/threading.py", 320, "wait", ""), USER): "waits for a lock or a thread",
        ((f"{LIB}/subprocess.py", 1200, "wait", ""), USER): "waits for a child process",
        ((f"{LIB}/socket.py", 700, "readinto", ""), USER): "waits for the network",
        (("/job/train.py", 3, "load", "with self.lock:"),): "waits for a lock",
        (("/job/train.py", 3, "load", "data = file.read()"),): "reads or writes files",
    }.items():
        finding = explain({0: Dump(None, stack(*frames))})
        assert (finding.kind, call_in(stack(*frames)).doing) == ("not_in_collective", doing)
        assert finding.where.startswith("/job/")


def test_a_model_that_is_wrapped_is_in_a_collective_unless_it_still_imports() -> None:
    wraps = (f"{TORCH}/nn/parallel/distributed.py", 842, "__init__", "")
    assert call_in(stack(wraps, USER)).collective == "DistributedDataParallel.__init__"
    imports = stack(("<frozen importlib._bootstrap>", 1176, "_find_and_load", ""), wraps, USER)
    assert (call_in(imports).collective, call_in(imports).doing) == ("", "imports a module")


def test_writing_a_checkpoint_or_running_under_elastic_is_no_collective() -> None:
    elastic = (f"{TORCH}/distributed/elastic/multiprocessing/errors/__init__.py", 355, "wrapper", "return f()")
    writes = (f"{TORCH}/distributed/checkpoint/filesystem.py", 400, "write_data", "")
    assert call_in(stack(writes, USER, elastic)).collective == ""
    assert call_in(stack(("/job/train.py", 1, "main", "x += 1"), elastic)) == call_in(
        stack(("/job/train.py", 1, "main", "x += 1"))
    )


def test_a_rank_in_the_kernel_is_told_with_what_the_kernel_says() -> None:
    finding = explain({0: Dump(None, IN_ALL_REDUCE), 1: Dump(None, "", "waits in the kernel: nfs_wait_bit_killable")})
    assert finding.stuck_ranks == (1,)
    assert "rank 1: waits in the kernel: nfs_wait_bit_killable" in finding.text


def test_nothing_at_all_is_said_to_be_nothing() -> None:
    assert explain({}).stuck_ranks == ()
    finding = explain({0: Dump(), 1: Dump()})
    assert (finding.kind, finding.where) == ("not_in_collective", "")
    assert "ranks 0-1: did not answer" in finding.text


def test_torn_stacks_are_read_as_far_as_they_go() -> None:
    text = 'File "nowhere"\n' + IN_ALL_REDUCE + '\n  File "/job/tr'
    assert [frame.function for frame in threads_in(text)[-1]] == ["all_reduce", "wrapper", "step", "<module>"]

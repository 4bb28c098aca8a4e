"""Timelines whose truth is known to the second. The first eight are ones that a widely used goodput library gets wrong.

Any tool that claims to measure effective training time can be held to them; each is told as a story and checked to the
nanosecond.
"""

from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from headway.accounting.advice import advise
from headway.accounting.ledger import Ledger, by_bucket, percent
from headway.accounting.rules import Bucket, StallRule
from headway.events.vocabulary import WAITS_ANYWHERE, StepRun
from headway.observe.html import page
from headway.observe.palette import who_failed
from headway.observe.perfetto import moments
from headway.observe.summary import summary
from headway.observe.terminal import render
from headway.testing import Rank, Story


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


def took(ledger: Ledger, rank: int | None = None) -> dict[str, float]:
    """Seconds by bucket, without those that took none; exact conservation is checked on the way."""
    assert sum(ledger.sums.values()) == ledger.wall_ns
    sums = ledger.sums if rank is None else ledger.rank_sums(rank)
    return {str(key): ns / 1e9 for key, ns in by_bucket(sums).items() if ns}


def ett(ledger: Ledger) -> float:
    return percent(ledger.buckets)[0]


def counts(ledger: Ledger) -> tuple[float, float, float]:
    steps = ledger.steps
    return (
        steps[Bucket.TRAINING_EFFECTIVE],
        steps[Bucket.WASTE_REPEATED_STEPS],
        steps[Bucket.WASTE_UNSAVED_STEPS],
    )


# --- the eight probes ----------------------------------------------------------------------------------------------


def test_probe_a_a_crash_right_after_a_checkpoint_is_not_free(story: Story) -> None:
    story.rank(start=0).wait(20).steps(110, each=1.0).saved(110).killed()
    story.rank(start=500).wait(80).restored(110).steps(110, each=1.0, first=110).saved(220).finished()
    ledger = story.ledger()
    assert took(ledger) == {
        "start.trainer_init": 20,
        "recover.detection": 370,
        "recover.trainer_init": 80,
        "training.effective": 220,
    }
    assert ett(ledger) == pytest.approx(100 * 220 / 690)
    assert len(ledger.failures) == 1
    assert counts(ledger) == (220, 0, 0)


def test_probe_b_recording_only_every_tenth_step_changes_nothing(story: Story) -> None:
    rank = story.rank()
    meter = rank.recorder.steps_meter
    meter.open(0)
    for step in range(0, 1000, 10):
        meter.begin()
        rank.wait(10.0)
        meter.end(step + 10)
    meter.close()
    rank.saved(1000).wait(20).finished()
    ledger = story.ledger()
    assert took(ledger) == {"training.effective": 1000, "shutdown.teardown": 20}
    assert counts(ledger) == (1000, 0, 0)


def test_probe_c_two_ranks_that_log_are_one_job_without_disruption(story: Story) -> None:
    for rank in (0, 1):
        story.rank(rank, of=2).wait(10).steps(1000, each=1.0).saved(1000).finished()
    ledger = story.ledger()
    assert ledger.failures == []
    assert len(ledger.attempts) == 1
    assert took(ledger) == {"start.trainer_init": 10, "training.effective": 1000}


def test_probe_d_a_job_that_resumes_after_its_recorded_end_moves_on(story: Story) -> None:
    story.rank(start=0).steps(100, each=1.0).saved(100).finished()
    assert ett(story.ledger()) == 100
    story.rank(start=150).restored(100).steps(50, each=1.0, first=100).saved(150).finished()
    ledger = story.ledger()
    assert took(ledger) == {"recover.detection": 50, "training.effective": 150}
    assert ledger.failures == []


def test_probe_e_a_second_reader_sees_what_the_first_does_and_what_comes_after(story: Story, tmp_path: Path) -> None:
    rank = story.rank()
    rank.steps(300, each=1.0)
    assert took(story.ledger(now=300, alive=(rank,))) == {"training.effective": 300}
    rank.steps(300, each=1.0)
    second = Story(tmp_path)
    for reader in (story, second):
        assert took(reader.ledger(now=600, alive=(rank,))) == {"training.effective": 600}


def test_probe_f_a_stall_inside_a_step_is_lost_time(story: Story) -> None:
    story.rank().steps(200, each=1.0, stall={100: 300.0}).saved(200).finished()
    assert took(story.ledger()) == {"training.effective": 200, "waste.stall": 300}


def test_probe_g_waiting_for_data_half_of_each_step_is_half_the_time(story: Story) -> None:
    story.rank().steps(1000, each=0.5, data=0.5).saved(1000).finished()
    ledger = story.ledger()
    assert took(ledger) == {"start.trainer_init": 0.5, "training.effective": 500, "waste.data_wait": 499.5}


def test_probe_h_blocking_checkpoints_are_counted(story: Story) -> None:
    saves = dict.fromkeys(range(99, 1000, 100), ("checkpoint_blocking", 120.0))
    story.rank().steps(1000, each=1.0, inside=saves).saved(1000).finished()
    assert took(story.ledger()) == {"training.effective": 1000, "waste.checkpoint_blocking": 1200}


# --- resuming ------------------------------------------------------------------------------------------------------


def fails_at(story: Story, steps: int, saved: int | None) -> None:
    rank = story.rank(start=0).steps(steps, each=1.0)
    if saved is not None:
        rank.saved(saved)
    rank.killed()


def test_resuming_at_the_checkpoint_repeats_what_came_after_it(story: Story) -> None:
    fails_at(story, 100, saved=60)
    story.rank(start=110).restored(60).steps(90, each=1.0, first=60).saved(150).finished()
    ledger = story.ledger()
    assert took(ledger) == {"recover.detection": 10, "training.effective": 150, "waste.repeated_steps": 40}
    assert counts(ledger) == (150, 40, 0)


def test_resuming_before_the_checkpoint_repeats_more(story: Story) -> None:
    fails_at(story, 100, saved=60)
    story.rank(start=110).restored(30).steps(120, each=1.0, first=30).saved(150).finished()
    assert counts(story.ledger()) == (150, 70, 0)


def test_resuming_after_the_checkpoint_skips_data_and_loses_the_work_on_it(story: Story) -> None:
    fails_at(story, 100, saved=60)
    story.rank(start=110).restored(60).steps(50, each=1.0, first=100).saved(150).finished()
    ledger = story.ledger()
    assert counts(ledger) == (110, 0, 40)
    assert took(ledger)["waste.unsaved_steps"] == 40


def test_resuming_from_nothing_repeats_everything(story: Story) -> None:
    fails_at(story, 100, saved=None)
    story.rank(start=110).steps(150, each=1.0).saved(150).finished()
    assert counts(story.ledger()) == (150, 100, 0)


def test_resuming_without_telling_of_the_checkpoint_is_known_by_the_first_step(story: Story) -> None:
    fails_at(story, 100, saved=None)
    story.rank(start=110).steps(50, each=1.0, first=100).saved(150).finished()
    assert counts(story.ledger()) == (150, 0, 0)


def test_skipping_data_to_the_position_is_recovery(story: Story) -> None:
    fails_at(story, 100, saved=100)
    rank = story.rank(start=110).restored(100).span("data_skip", 25)
    rank.steps(50, each=1.0, first=100).saved(150).finished()
    ledger = story.ledger()
    assert took(ledger) == {"recover.detection": 10, "recover.data_skip": 25, "training.effective": 150}


def test_resuming_twice_in_a_row_repeats_each_time(story: Story) -> None:
    fails_at(story, 100, saved=60)
    story.rank(start=110).restored(60).steps(30, each=1.0, first=60).killed()
    story.rank(start=150).restored(60).steps(90, each=1.0, first=60).saved(150).finished()
    ledger = story.ledger()
    assert counts(ledger) == (150, 30 + 40, 0)
    assert [round(ns / 1e9) for ns in ledger.times_to_recover_ns] == [10, 10]
    assert len(ledger.failures) == 2


def test_an_attempt_that_fails_before_its_first_step_belongs_to_one_recovery(story: Story) -> None:
    fails_at(story, 100, saved=100)
    story.rank(start=110).wait(5).crashed("ImportError: no")
    story.rank(start=130).wait(5).restored(100).steps(50, each=1.0, first=100).saved(150).finished()
    ledger = story.ledger()
    assert [ns / 1e9 for ns in ledger.times_to_recover_ns] == [35]
    assert took(ledger) == {"recover.detection": 25, "recover.trainer_init": 10, "training.effective": 150}
    assert [failure["attempt"] for failure in ledger.failures] == [0, 1]


def test_a_rollback_inside_one_process_repeats_steps_without_a_failure(story: Story) -> None:
    rank = story.rank().steps(100, each=1.0).saved(60)
    rank.span("checkpoint_restore", 5).restored(60).steps(90, each=1.0, first=60).saved(150).finished()
    ledger = story.ledger()
    assert counts(ledger) == (150, 40, 0)
    assert took(ledger)["recover.checkpoint_restore"] == 5
    assert ledger.failures == []


def test_with_twice_the_ranks_half_the_steps_repeat_the_same_data(story: Story) -> None:
    for rank in (0, 1):
        told = story.rank(rank, of=2, start=0).steps(100, each=1.0, batch_size=32)
        told.saved(60).killed()
    for rank in range(4):
        told = story.rank(rank, of=4, start=110).restored(60)
        told.steps(60, each=1.0, first=60, batch_size=32).saved(120).finished()
    ledger = story.ledger()
    assert counts(ledger) == (100 + 40, 20, 0)
    assert took(ledger)["waste.repeated_steps"] == 20
    assert took(ledger, rank=3)["waste.repeated_steps"] == 20


def test_a_job_that_ends_with_unsaved_work_has_lost_it(story: Story) -> None:
    story.rank().steps(90, each=1.0).saved(90).steps(10, each=1.0).finished()
    ledger = story.ledger()
    assert took(ledger) == {"training.effective": 90, "waste.unsaved_steps": 10}
    assert counts(ledger) == (90, 0, 10)


def test_a_job_that_failed_for_good_without_a_checkpoint_has_lost_everything(story: Story) -> None:
    story.rank().steps(90, each=1.0).crashed()
    assert took(story.ledger()) == {"waste.unsaved_steps": 90}


def test_a_job_that_ends_well_and_never_tells_of_checkpoints_keeps_its_work(story: Story) -> None:
    story.rank().steps(90, each=1.0).finished()
    assert took(story.ledger()) == {"training.effective": 90}


def test_work_past_the_last_checkpoint_is_not_lost_while_the_job_runs(story: Story) -> None:
    rank = story.rank().steps(90, each=1.0).saved(50)
    assert took(story.ledger(now=90, alive=(rank,))) == {"training.effective": 90}


def test_steps_of_another_program_in_the_same_job_are_not_repeats(story: Story) -> None:
    story.rank(start=0, program="pretrain.py").steps(100, each=1.0).saved(100).finished()
    story.rank(start=100, program="finetune.py").steps(50, each=1.0).saved(50).finished()
    assert counts(story.ledger()) == (150, 0, 0)


def test_a_preparation_script_is_not_an_attempt(story: Story) -> None:
    story.rank(start=0, program="prepare.py").wait(30).finished()
    story.rank(start=40).wait(5).steps(100, each=1.0).saved(100).finished()
    ledger = story.ledger()
    assert len(ledger.attempts) == 1
    assert took(ledger) == {"start.launcher_init": 40, "start.trainer_init": 5, "training.effective": 100}


def test_epochs_follow_one_another_and_what_lies_between_is_shown_as_unattributed(story: Story) -> None:
    rank = story.rank()
    for _ in range(3):
        rank.steps(50, each=1.0).wait(4)
    rank.saved(150).finished()
    ledger = story.ledger()
    assert took(ledger) == {"training.effective": 150, "unattributed": 8, "shutdown.teardown": 4}
    assert counts(ledger) == (150, 0, 0)


# --- resuming without knowing where ---------------------------------------------------------------------------------


def test_a_process_that_only_loads_a_file_goes_on_where_that_was_saved(story: Story) -> None:
    story.rank(start=0).steps(60, each=1.0).saved(60, path="last.pt").steps(40, each=1.0).killed()
    story.rank(start=110).restored(None, path="last.pt").steps(90, each=1.0).saved(90, path="last.pt").finished()
    ledger = story.ledger()
    assert took(ledger) == {"recover.detection": 10, "training.effective": 150, "waste.repeated_steps": 40}
    assert counts(ledger) == (150, 40, 0)
    assert [(a.attempt.stints[0].first, a.attempt.stints[0].next) for a in ledger.attempts] == [(0, 100), (60, 150)]


def test_each_process_counts_on_from_the_one_before_it(story: Story) -> None:
    story.rank(start=0).steps(100, each=1.0).saved(100, path="last.pt").killed()
    story.rank(start=110).restored(None, path="last.pt").steps(50, each=1.0).saved(50, path="last.pt").killed()
    story.rank(start=170).restored(None, path="last.pt").steps(50, each=1.0).saved(50, path="last.pt").finished()
    ledger = story.ledger()
    assert counts(ledger) == (200, 0, 0)
    assert ledger.attempts[2].attempt.stints[0].next == 200
    saved = [member.checkpoints for a in ledger.attempts for member in a.attempt.members.values()]
    assert [(what, step) for told in saved for _, what, step in told] == [
        ("saved", 100), ("restored", 100), ("saved", 150), ("restored", 150), ("saved", 200)
    ]  # fmt: skip


def test_a_file_that_was_moved_is_known_by_what_it_is(story: Story) -> None:
    story.rank(start=0).steps(100, each=1.0).saved(60, path="new.pt", file="8:1:2:3").killed()
    story.rank(start=110).restored(None, path="best.pt", file="8:1:2:3").steps(90, each=1.0).saved(90).finished()
    assert counts(story.ledger()) == (150, 40, 0)


def test_the_path_is_believed_before_the_file_and_the_latest_save_before_an_earlier_one(story: Story) -> None:
    rank = story.rank(start=0).steps(20, each=1.0).saved(20, path="last.pt", file="1").steps(40, each=1.0)
    rank.saved(60, path="last.pt", file="2").steps(40, each=1.0).killed()
    story.rank(start=110).restored(None, path="last.pt", file="1").steps(90, each=1.0).saved(90).finished()
    assert counts(story.ledger()) == (150, 40, 0)


def test_of_all_that_was_loaded_the_last_that_the_job_had_saved_counts(story: Story) -> None:
    rank = story.rank(start=0).restored(None, path="pretrained.pt").steps(30, each=1.0).saved(30, path="30.pt")
    rank.steps(70, each=1.0).saved(100, path="100.pt").killed()
    again = story.rank(start=110).restored(None, path="30.pt").restored(None, path="100.pt")
    again.restored(None, path="vocabulary.pt").steps(50, each=1.0).saved(50).finished()
    ledger = story.ledger()
    assert counts(ledger) == (150, 0, 0)
    assert ledger.attempts[0].attempt.stints[0].restored is None


def test_what_the_job_did_not_save_leaves_a_process_its_own_count(story: Story) -> None:
    fails_at(story, 100, saved=100)
    story.rank(start=110).restored(None, path="elsewhere.pt").steps(150, each=1.0).saved(150).finished()
    assert counts(story.ledger()) == (150, 100, 0)


def test_what_is_saved_after_a_load_is_not_what_was_loaded(story: Story) -> None:
    rank = story.rank().restored(None, path="last.pt").steps(50, each=1.0)
    rank.saved(50, path="last.pt").steps(50, each=1.0).saved(100, path="last.pt").finished()
    ledger = story.ledger()
    assert counts(ledger) == (100, 0, 0)
    assert ledger.attempts[0].attempt.stints[0].restored is None


def test_a_state_is_known_again_however_it_was_stored(story: Story) -> None:
    story.rank(start=0).steps(60, each=1.0).saved(60, content="c60", durable=False).steps(40, each=1.0).killed()
    story.rank(start=110).restored(None, content="c60").steps(90, each=1.0).saved(90).finished()
    assert counts(story.ledger()) == (150, 40, 0)


def test_a_state_tells_better_than_an_optimizer_that_counts_its_own_training_only(story: Story) -> None:
    first = story.rank(start=0).steps(50, each=1.0).saved(50)  # another model, trained before in the same process
    first.steps(40, each=1.0).saved(70, content="c70", durable=False).killed()
    story.rank(start=110).restored(20, content="c70").steps(50, each=1.0, first=20).saved(70).finished()
    assert counts(story.ledger()) == (120, 20, 0)


def test_training_that_goes_back_to_a_state_of_its_own_repeats_what_came_after_it(story: Story) -> None:
    rank = story.rank().steps(30, each=1.0).saved(30, content="c30", durable=False).steps(20, each=1.0)
    rank.restored(None, content="c30").steps(40, each=1.0).saved(90).finished()
    assert counts(story.ledger()) == (70, 20, 0)


def test_several_trainings_of_one_command_repeat_nothing(story: Story) -> None:
    for start in (0, 100, 200):
        story.rank(start=start).span("imports", 5).steps(50, each=1.0).wait(5).finished()
    ledger = story.ledger()
    assert counts(ledger) == (150, 0, 0)
    assert took(ledger) == {
        "start.launcher_init": 80, "start.trainer_init": 15, "training.effective": 150, "shutdown.teardown": 15,
    }  # fmt: skip
    assert not ledger.failures


def test_a_training_with_other_arguments_is_another_one_even_if_it_begins_with_the_weights_of_the_first(
    story: Story,
) -> None:
    story.rank(start=0, command="train.py --phase 1").steps(50, each=1.0).saved(50, path="a.pt").finished()
    again = story.rank(start=60, command="train.py --phase 2").restored(None, path="a.pt")
    again.steps(50, each=1.0).saved(100).finished()
    ledger = story.ledger()
    assert counts(ledger) == (100, 0, 0)
    assert took(ledger)["start.launcher_init"] == 10


def test_a_program_that_replaces_itself_does_not_fail(story: Story) -> None:
    first = story.rank(start=0, pid=7)
    first.steps(20, each=1.0).saved(20, path="a.pt").killed()
    again = story.rank(start=25, pid=7, started_ns=first.process.started_ns).restored(None, path="a.pt")
    again.steps(20, each=1.0).saved(40).finished()
    ledger = story.ledger()
    assert counts(ledger) == (40, 0, 0)
    assert not ledger.failures
    assert ledger.wall_ns == 45e9


def test_what_a_shell_becomes_began_when_what_it_ran_before_had_ended(story: Story) -> None:
    shell = story.launcher(start=0, pid=7, command="bash -c 'python a.py; python a.py'", program="bash")
    story.rank(start=0, pid=8).steps(20, each=1.0).finished()
    story.rank(start=21, pid=7, started_ns=shell.process.started_ns).steps(20, each=1.0).finished()
    shell.wait(41).gone(0)
    ledger = story.ledger()
    assert counts(ledger) == (40, 0, 0)
    assert took(ledger) == {"start.trainer_init": 1, "training.effective": 40}
    assert [attempt.attempt.members[0].process.pid for attempt in ledger.attempts] == [8, 7]


def test_a_shell_whose_last_command_fails_takes_nothing_from_a_training_that_ended_well(story: Story) -> None:
    shell = story.launcher(start=0, command="bash train.sh", program="train.sh")
    story.rank(start=1).steps(20, each=1.0).finished()
    shell.wait(22).gone(1)
    ledger = story.ledger()
    assert counts(ledger) == (20, 0, 0)
    assert ledger.state == "failed"


def test_trainings_side_by_side_count_as_ranks(story: Story) -> None:
    for _ in range(2):
        story.rank(start=0).span("imports", 5).steps(50, each=1.0).saved(50).finished()
    ledger = story.ledger()
    assert len(ledger.attempts) == 1
    assert took(ledger) == {"start.trainer_init": 5, "training.effective": 50}
    assert any("2 processes trained side by side" in note for note in ledger.notes)


@pytest.mark.parametrize("early", [3, 12])
def test_an_early_stall_is_known_once_the_pace_is(story: Story, early: int) -> None:
    story.rank().steps(15, each=0.5, stall={early: 10.0}).saved(15).finished()
    assert took(story.ledger()) == {"training.effective": 7.5, "waste.stall": 10.0}


def test_what_recurs_every_so_many_steps_belongs_to_the_loop(story: Story) -> None:
    longer = dict.fromkeys(range(40, 400, 40), 3.0)
    story.rank().steps(400, each=0.1, stall=longer).saved(400).finished()
    assert took(story.ledger()) == {"training.effective": 40 + 27}


def test_a_step_that_is_known_needs_no_file(story: Story) -> None:
    story.rank(start=0).steps(100, each=1.0).saved(60, path="last.pt").killed()
    again = story.rank(start=110).restored(None, path="last.pt").restored(30)
    again.steps(120, each=1.0, first=30).saved(150).finished()
    assert counts(story.ledger()) == (150, 70, 0)


def test_ranks_that_get_their_weights_from_the_one_that_loads_go_on_with_it(story: Story) -> None:
    for rank in (0, 1):
        told = story.rank(rank, of=2, start=0).steps(100, each=1.0)
        (told.saved(20, path="first.pt").saved(60, path="last.pt") if rank == 0 else told).killed()
    for rank in (0, 1):
        told = story.rank(rank, of=2, start=110)
        if rank == 0:
            told.restored(None, path="first.pt").restored(None, path="last.pt")
        told.steps(90, each=1.0).saved(90).finished()
    ledger = story.ledger()
    assert counts(ledger) == (150, 40, 0)
    assert took(ledger, 0) == took(ledger, 1)


def test_epochs_after_a_load_go_on_counting_and_a_rollback_inside_a_process_counts_anew(story: Story) -> None:
    story.rank(start=0).steps(100, each=1.0).saved(100, path="a.pt").killed()
    rank = story.rank(start=110).restored(None, path="a.pt")
    rank.steps(30, each=1.0).saved(30, path="b.pt").wait(2).steps(20, each=1.0)
    rank.restored(None, path="b.pt").steps(70, each=1.0).saved(120).finished()
    ledger = story.ledger()
    assert [(s.first, s.next, s.restored) for s in ledger.attempts[1].attempt.stints] == [
        (100, 150, 100), (130, 200, 130)
    ]  # fmt: skip
    assert counts(ledger) == (200, 20, 0)


def test_a_run_that_only_the_cell_knows_of_is_counted_where_it_belongs(story: Story) -> None:
    story.rank(start=0).steps(100, each=1.0).saved(60, path="last.pt").killed()
    rank = story.rank(start=110).restored(None, path="last.pt")
    meter = rank.recorder.steps_meter
    meter.open()
    for step in range(50):
        meter.begin()
        rank.wait(1.0)
        meter.end(step + 1)
    assert counts(story.ledger(now=160, alive=(rank,))) == (110, 40, 0)


def test_another_program_may_go_on_from_a_checkpoint_and_repeats_nothing(story: Story) -> None:
    story.rank(start=0, program="pretrain.py").steps(100, each=1.0).saved(100, path="last.pt").finished()
    again = story.rank(start=100, program="finetune.py").restored(None, path="last.pt")
    again.steps(50, each=1.0).saved(50).finished()
    ledger = story.ledger()
    assert counts(ledger) == (150, 0, 0)
    assert ledger.attempts[1].attempt.stints[0].first == 100


# --- spans ---------------------------------------------------------------------------------------------------------


def test_nested_stages_go_to_the_innermost(story: Story) -> None:
    rank = story.rank()
    with rank.during("train_module_creation"):
        rank.wait(3)
        with rank.during("init_plugins"):
            rank.wait(2)
        rank.wait(1)
    rank.steps(10, each=1.0).finished()
    sums = story.ledger().sums
    assert sums[(Bucket.START_TRAINER_INIT, "train_module_creation")] == 4e9
    assert sums[(Bucket.START_TRAINER_INIT, "init_plugins")] == 2e9


def test_overlapping_spans_are_counted_once_by_precedence(story: Story) -> None:
    rank = story.rank()
    recorder = rank.recorder
    compiling, restoring = recorder.span("pt2_compilation"), recorder.span("checkpoint_restore")
    with rank.during("train_module_creation"):
        compiling.__enter__()
        rank.wait(5)
        restoring.__enter__()
        rank.wait(5)
        compiling.__exit__(None, None, None)
        rank.wait(5)
        restoring.__exit__(None, None, None)
        rank.wait(5)
    rank.steps(10, each=1.0).finished()
    ledger = story.ledger()
    assert took(ledger) == {"start.pt2_compilation": 5, "start.trainer_init": 15, "training.effective": 10}
    assert ledger.sums[(Bucket.START_TRAINER_INIT, "pre_train")] == 10e9


def test_a_span_that_was_open_at_a_kill_is_counted_up_to_the_failure(story: Story) -> None:
    rank = story.rank()
    rank.recorder.span("train_module_creation").__enter__()
    rank.wait(7).killed(seen=True)
    ledger = story.ledger()
    assert took(ledger) == {"start.trainer_init": 7}
    assert ledger.sums == {(Bucket.START_TRAINER_INIT, "train_module_creation"): 7e9}


def test_spans_of_unknown_names_are_not_counted(story: Story) -> None:
    story.rank().steps(50, each=1.0, inside={10: ("forward", 0.5)}).saved(50).finished()
    assert took(story.ledger()) == {"training.effective": 50.5}


def test_compilation_in_the_first_step_is_start_and_later_is_recompilation(story: Story) -> None:
    compiles = {0: ("pt2_compilation", 30.0), 20: ("pt2_compilation", 7.0)}
    story.rank().steps(50, each=1.0, inside=compiles).saved(50).finished()
    assert took(story.ledger()) == {
        "start.pt2_compilation": 30,
        "training.effective": 50,
        "waste.recompilation": 7,
    }


def test_a_first_step_that_warms_up_unseen_is_initialisation_not_training(story: Story) -> None:
    story.rank().steps(50, each=1.0, stall={0: 60.0}).saved(50).finished()
    assert took(story.ledger()) == {"start.trainer_init": 60, "training.effective": 50}


def test_evaluation_checkpoint_and_publishing_after_the_last_step_are_shutdown(story: Story) -> None:
    rank = story.rank().steps(50, each=1.0)
    rank.span("checkpoint_blocking", 3).saved(50).span("evaluation", 5).span("publish", 9).wait(2).finished()
    assert took(story.ledger()) == {
        "training.effective": 50,
        "waste.evaluation": 5,
        "shutdown.final_checkpoint": 3,
        "shutdown.publish": 9,
        "shutdown.teardown": 2,
    }


def test_gradient_accumulation_is_neither_stall_nor_waste(story: Story) -> None:
    updates = dict.fromkeys(range(3, 400, 4), 2.0)
    story.rank().steps(400, each=0.1, stall=updates).saved(400).finished()
    assert took(story.ledger()) == {"training.effective": 40 + 200}


def test_several_optimizers_are_one_step(story: Story) -> None:
    rank = story.rank()
    for _ in rank.recorder.steps(range(100)):
        for _optimizer in range(2):
            rank.wait(0.5)
    rank.saved(100).finished()
    assert counts(story.ledger()) == (100, 0, 0)
    assert took(story.ledger()) == {"training.effective": 100}


def test_a_prefetching_loader_that_keeps_up_costs_nothing(story: Story) -> None:
    rank = story.rank()
    rank.steps(1, each=1.0, data=20.0).steps(99, each=1.0).saved(100).finished()
    ledger = story.ledger()
    assert took(ledger) == {"start.trainer_init": 20, "training.effective": 100}
    assert ledger.sums[(Bucket.START_TRAINER_INIT, "get_first_batch_data")] == 20e9


def test_ragged_batches_are_not_stalls_but_a_rare_long_step_is(story: Story) -> None:
    ragged = dict.fromkeys(range(0, 600, 10), 25.0)
    story.rank(0, of=2).steps(600, each=1.0, stall=ragged).saved(600).finished()
    story.rank(1, of=2).steps(600, each=1.0, stall={300: 25.0}).saved(600).finished()
    ledger = story.ledger()
    ragged_rank, steady_rank = took(ledger, 0), took(ledger, 1)
    assert ragged_rank["training.effective"] >= 600 + 50 * 25
    assert steady_rank["waste.stall"] == 25


def test_the_stall_threshold_can_be_set(tmp_path: Path) -> None:
    story = Story(tmp_path, stall=StallRule(times=100.0))
    story.rank().steps(200, each=1.0, stall={100: 30.0}).saved(200).finished()
    assert took(story.ledger()) == {"training.effective": 230}


# --- what is told when it is over ---------------------------------------------------------------------------------


def test_an_activity_told_when_it_is_over_takes_the_time_it_took(story: Story) -> None:
    rank = story.rank().wait(10).period("train_module_creation", 6, ago=1)
    rank.steps(10, each=1.0).wait(7).period("evaluation", 5, ago=2).steps(10, each=1.0).finished()
    ledger = story.ledger()
    found = {"start.trainer_init": 10, "training.effective": 20, "waste.evaluation": 5, "unattributed": 2}
    assert took(ledger) == found
    assert ledger.sums[(Bucket.START_TRAINER_INIT, "train_module_creation")] == 6e9


def test_an_activity_told_late_yields_to_stronger_ones_and_takes_from_weaker_ones(story: Story) -> None:
    rank = story.rank().steps(10, each=1.0)
    rank.span("evaluation", 4).span("checkpoint_blocking", 3).span("evaluation", 2).wait(1).period("data_wait", 9)
    rank.steps(10, each=1.0).finished()
    assert took(story.ledger()) == {
        "training.effective": 20,
        "waste.checkpoint_blocking": 3,
        "waste.data_wait": 6,
        "waste.evaluation": 1,
    }


def test_an_activity_told_inside_a_span_leaves_the_rest_to_the_span(story: Story) -> None:
    rank = story.rank()
    with rank.during("train_module_creation"):
        rank.wait(10).period("checkpoint_restore", 4, ago=3).wait(5)
    rank.steps(10, each=1.0).finished()
    sums = story.ledger().sums
    assert sums[(Bucket.START_TRAINER_INIT, "train_module_creation")] == 11e9
    assert sums[(Bucket.START_TRAINER_INIT, "pre_train")] == 4e9


def test_an_activity_cannot_take_what_steps_have_settled_nor_what_came_before_the_process(story: Story) -> None:
    rank = story.rank().wait(5).period("device_init", 1000).steps(300, each=1.0)
    rank.wait(4).period("evaluation", 100).steps(10, each=1.0).finished()
    ledger = story.ledger()
    assert took(ledger) == {"start.trainer_init": 5, "training.effective": 310, "waste.evaluation": 4}
    assert ledger.sums[(Bucket.START_TRAINER_INIT, "device_init")] == 5e9


def test_an_activity_told_late_inside_the_run_of_steps_under_way_is_counted(story: Story) -> None:
    rank = story.rank()
    meter = rank.recorder.steps_meter
    meter.open(0)
    for step in range(20):
        meter.begin()
        rank.wait(1.0)
        if step == 10:
            rank.period("pt2_compilation", 0.5)
        meter.end(step + 1)
    ledger = story.ledger(now=20, alive=(rank,))
    assert took(ledger) == {"training.effective": 19.5, "waste.recompilation": 0.5}


def test_a_process_group_that_is_told_late_still_aligns_hosts(story: Story) -> None:
    for rank, (boot, ahead) in enumerate((("a", 0.0), ("b", 3600.0))):
        told = story.rank(rank, of=2, boot=boot, wall_ahead=ahead).wait(10).period("process_group_init", 8)
        told.steps(100, each=1.0).saved(100).finished()
    assert story.ledger().wall_ns == 110e9


def test_an_activity_of_an_unknown_name_told_late_is_shown_and_not_counted(story: Story) -> None:
    story.rank().wait(5).period("tokenizer", 3, ago=1).steps(10, each=1.0).finished()
    ledger = story.ledger()
    assert ledger.sums == {(Bucket.START_TRAINER_INIT, "other"): 5e9, (Bucket.TRAINING_EFFECTIVE, ""): 10e9}
    [(name, _, begin, end)] = ledger.attempts[0].views[0].bars()
    assert (name, begin - ledger.begin_ns, end - ledger.begin_ns) == ("tokenizer", 1e9, 4e9)


def test_waits_that_may_lie_anywhere_in_a_step_are_counted_beside_a_span_at_its_begin(tmp_path: Path) -> None:
    for flags in (0, WAITS_ANYWHERE):
        told = Story(tmp_path, f"flags-{flags}")
        rank = told.rank().steps(10, each=1.0).span("checkpoint_blocking", 3).wait(2)
        end = rank.clock.now_ns()
        rank.recorder.record(StepRun(flags, 1, 10, 11, end - round(5e9), end, round(1.5e9)))
        rank.finished()
        found = took(told.ledger())
        assert found["waste.checkpoint_blocking"] == 3
        assert found.get("waste.data_wait", 0) == (1.5 if flags else 0)


# --- ranks ---------------------------------------------------------------------------------------------------------


def test_the_rank_everyone_waited_for_determines_the_start_and_is_named(story: Story) -> None:
    story.rank(0, of=2).span("train_module_creation", 5).steps(1, each=26.0).steps(99, each=1.0).saved(100).finished()
    story.rank(1, of=2).span("train_module_creation", 30).steps(100, each=1.0).saved(100).finished()
    ledger = story.ledger()
    assert ledger.attempts[0].critical_rank == 1
    assert ledger.time_to_start_ns == 30e9
    assert took(ledger) == {"start.trainer_init": 30, "training.effective": 100}


def test_the_job_trains_when_its_slowest_rank_does(story: Story) -> None:
    story.rank(0, of=2).steps(100, each=1.0).saved(100).finished()
    story.rank(1, of=2).steps(100, each=0.6, data=0.4).saved(100).finished()
    ledger = story.ledger()
    assert ledger.slowest_rank == 1
    assert took(ledger)["waste.data_wait"] == pytest.approx(39.6)
    assert took(ledger, 0) == {"training.effective": 100}


def test_a_stall_on_one_rank_is_explained_by_the_rank_that_caused_it(story: Story) -> None:
    waits = {50: ("data_wait", 60.0)}
    saves = {80: ("checkpoint_blocking", 40.0)}
    story.rank(0, of=2).steps(100, each=1.0, inside=waits, stall={80: 40.0}).saved(100).finished()
    story.rank(1, of=2).steps(100, each=1.0, inside=saves, stall={50: 60.0}).saved(100).finished()
    found = took(story.ledger())
    assert found["training.effective"] == 100
    assert found["waste.data_wait"] == 60
    assert found["waste.checkpoint_blocking"] == pytest.approx(40, abs=1)


def test_the_last_rank_to_leave_determines_the_shutdown(story: Story) -> None:
    story.rank(0, of=2).steps(100, each=1.0).saved(100).span("publish", 50).finished()
    story.rank(1, of=2).steps(100, each=1.0).finished()
    assert took(story.ledger()) == {"training.effective": 100, "shutdown.publish": 50}


def test_a_rank_that_never_starts_is_reported_and_its_time_is_unattributed(story: Story) -> None:
    for rank in (0, 1):
        story.rank(rank, of=3).span("process_group_init", 60).crashed("DistStoreError: timed out")
    ledger = story.ledger()
    assert took(ledger) == {"start.trainer_init": 60}
    assert took(ledger, 2) == {"unattributed": 60}
    assert any("no journal of rank 2 of 3" in note for note in ledger.notes)


def test_a_rank_that_missed_an_attempt_does_not_mix_attempts_up(story: Story) -> None:
    story.rank(0, of=2, start=0, launch="0").wait(10).killed()
    story.rank(1, of=2, start=30, launch="1").steps(10, each=1.0).finished()
    story.rank(0, of=2, start=31, launch="1").steps(10, each=1.0).finished()
    ledger = story.ledger()
    assert [sorted(attempt.views) for attempt in ledger.attempts] == [[0], [0, 1]]


def test_a_rank_that_dies_silently_fails_the_attempt(story: Story) -> None:
    story.rank(0, of=2).steps(50, each=1.0).saved(50).wait(20).crashed("RuntimeError: connection reset by peer")
    story.rank(1, of=2).steps(50, each=1.0).killed(seen=True)
    for rank in (0, 1):
        story.rank(rank, of=2, start=100).restored(50).steps(50, each=1.0, first=50).saved(100).finished()
    ledger = story.ledger()
    assert ledger.failures == [{"attempt": 0, "rank": 1, "unseen_ranks": [], "category": None, "decision": ""}]
    assert took(ledger) == {"recover.teardown": 20, "recover.detection": 30, "training.effective": 100}


def test_a_killed_rank_is_the_cause_though_others_notice_before_its_end_is_seen(story: Story) -> None:
    story.rank(0, of=3).steps(50, each=1.0).wait(0.1).crashed("RuntimeError: connection reset by peer")
    story.rank(1, of=3).steps(50, each=1.0).wait(0.2).killed(seen=True)
    story.rank(2, of=3).steps(50, each=1.0).wait(0.15).gone(-15)
    assert story.ledger().failures[0]["rank"] == 1


def test_a_straggler_that_its_launcher_kills_is_not_the_cause(story: Story) -> None:
    story.rank(0, of=2).steps(50, each=1.0).wait(0.1).crashed("ValueError: a bad batch")
    story.rank(1, of=2).steps(50, each=1.0).wait(30.1).killed(seen=True)
    assert story.ledger().failures[0]["rank"] == 0


def test_ranks_whose_end_was_not_seen_may_have_failed_first_and_the_report_says_so(story: Story) -> None:
    story.rank(0, of=2).steps(50, each=1.0).wait(0.1).crashed("RuntimeError: connection reset by peer")
    story.rank(1, of=2).steps(50, each=1.0).killed()
    (failure,) = story.ledger().failures
    assert (failure["rank"], failure["unseen_ranks"]) == (0, [1])
    assert who_failed(0, [1]) == "rank 0 (or rank 1, whose end was not seen)"
    assert who_failed(0, [1, 2]) == "rank 0 (or one of 2 ranks, whose end was not seen)"


def test_a_node_that_is_lost_is_the_cause_and_what_survivors_raise_is_not(story: Story) -> None:
    survivor = story.rank(0, of=2, boot="a").steps(50, each=1.0).saved(50).wait(30)
    survivor.crashed("RuntimeError: connection reset by peer")
    lost = story.rank(1, of=2, boot="b").steps(50, each=1.0)
    for rank, boot in ((0, "a"), (1, "c")):
        again = story.rank(rank, of=2, start=100, boot=boot).restored(50)
        again.steps(50, each=1.0, first=50).saved(100).finished()
    ledger = story.ledger(lost=(lost,))
    assert ledger.failures == [{"attempt": 0, "rank": 1, "unseen_ranks": [], "category": None, "decision": ""}]
    assert took(ledger) == {"recover.teardown": 30, "recover.detection": 20, "training.effective": 100}
    assert any("node b (rank 1) was not heard of again" in note for note in ledger.notes)


def test_two_jobs_with_one_id_are_noticed_and_still_add_up(story: Story) -> None:
    story.rank(start=0).steps(100, each=1.0).saved(100).finished()
    story.rank(start=40).steps(100, each=1.0).saved(100).finished()
    ledger = story.ledger()
    assert any("trained side by side without a process group" in note for note in ledger.notes)
    took(ledger)


def test_a_step_that_hangs_shows_as_a_growing_stall_while_it_hangs(story: Story) -> None:
    rank = story.rank().steps(100, each=1.0)
    rank.dies_in_step()
    for now in (105, 150, 400):
        found = took(story.ledger(now=now, alive=(rank,)))
        assert found == ({"training.effective": 105} if now == 105 else
                         {"training.effective": 101, "waste.stall": now - 101})  # fmt: skip


def test_a_step_cut_short_by_a_kill_is_lost(story: Story) -> None:
    rank = story.rank().steps(100, each=1.0).saved(100)
    rank.dies_in_step(after=0.5)
    rank.killed(seen=True)
    story.rank(start=110).restored(100).steps(10, each=1.0, first=100).saved(110).finished()
    found = took(story.ledger())
    assert found == {"recover.detection": 9.5, "training.effective": 110, "waste.unsaved_steps": 0.5}


def test_a_rank_that_leaves_early_does_not_end_the_training_of_the_others(story: Story) -> None:
    story.rank(0, of=2).steps(1000, each=1.0).saved(1000).finished()
    story.rank(1, of=2).steps(10, each=1.0, data=2.0).finished()
    found = took(story.ledger())
    assert found["training.effective"] == pytest.approx(1000 - 20, abs=3)
    assert "shutdown.teardown" not in found


def test_a_rank_that_joins_late_is_not_what_the_start_waited_for(story: Story) -> None:
    story.rank(0, of=2).steps(1000, each=1.0).saved(1000).finished()
    story.rank(1, of=2, start=500).steps(500, each=1.0, first=500).finished()
    assert took(story.ledger()) == {"training.effective": 1000}


def test_a_wait_for_data_that_is_also_a_span_is_counted_once(story: Story) -> None:
    rank = story.rank()

    def loader() -> Iterator[int]:
        for number in range(400):
            with rank.during("data_wait"):
                rank.wait(0.5)
            yield number

    for _ in rank.recorder.steps(loader()):
        rank.wait(0.5)
    rank.saved(400).finished()
    assert took(story.ledger())["training.effective"] == 200


def test_a_survivor_that_finishes_its_step_after_the_failure_keeps_its_steps(story: Story) -> None:
    story.rank(1, of=2).steps(199, each=1.0).wait(0.5).crashed()
    survivor = story.rank(0, of=2)
    meter = survivor.recorder.steps_meter
    meter.open(0)
    for step in range(200):
        meter.begin()
        survivor.wait(1.0)
        meter.end(step + 1)
    survivor.saved(200).killed()
    for rank in (0, 1):
        story.rank(rank, of=2, start=300).restored(200).steps(50, each=1.0, first=200).saved(250).finished()
    assert took(story.ledger(), 0)["training.effective"] >= 199 + 50


def test_more_ranks_than_before_are_a_new_attempt_whoever_comes_first(story: Story) -> None:
    for rank in (0, 1):
        story.rank(rank, of=2).steps(100, each=1.0).saved(100).killed()
    for rank in (3, 2, 1, 0):
        again = story.rank(rank, of=4, start=120 - 0.1 * rank).restored(100)
        again.steps(50, each=1.0, first=100).saved(150).finished()
    ledger = story.ledger()
    assert [sorted(attempt.views) for attempt in ledger.attempts] == [[0, 1], [0, 1, 2, 3]]
    assert counts(ledger) == (150, 0, 0)


def test_checkpoints_of_one_program_do_not_keep_the_work_of_another(story: Story) -> None:
    story.rank(start=0, program="pretrain.py").steps(100, each=1.0).saved(100).finished()
    story.rank(start=100, program="finetune.py").steps(50, each=1.0).crashed()
    assert counts(story.ledger()) == (100, 0, 50)


def test_a_rank_that_waits_for_data_now_explains_the_stall_of_the_others(story: Story) -> None:
    waiting = story.rank(1, of=2).steps(100, each=1.0)
    waiting.recorder.steps_meter.open()
    stuck = story.rank(0, of=2).steps(100, each=1.0)
    stuck.dies_in_step()
    ledger = story.ledger(now=400, alive=(waiting, stuck))
    assert took(ledger)["waste.data_wait"] == pytest.approx(300, abs=1.5)


@pytest.mark.parametrize("case", ["another start", "restored by one", "batch size by one"])
def test_ranks_that_cut_their_loops_differently_still_train_the_same_steps(story: Story, case: str) -> None:
    size = 8 if case == "batch size by one" else None
    whole = story.rank(0, of=2).steps(100, each=1.0, batch_size=size)
    if case == "restored by one":
        whole.restored(100)
    whole.steps(100, each=1.0, first=100, batch_size=size).saved(200).finished()
    other = story.rank(1, of=2)
    other.steps(99 if case == "another start" else 100, each=1.0).steps(100, each=1.0, first=100).finished()
    assert counts(story.ledger()) == (200, 0, 0)


def test_an_export_after_a_training_that_ended_well_is_shutdown_not_recovery(story: Story) -> None:
    story.rank(start=0).steps(100, each=1.0).span("checkpoint_blocking", 5).saved(100).finished()
    story.rank(start=110, program="export.py").wait(40).finished()
    ledger = story.ledger()
    assert took(ledger) == {"training.effective": 100, "shutdown.final_checkpoint": 5, "shutdown.teardown": 45}
    assert len(ledger.attempts) == 1


def test_attempts_numbered_by_a_supervisor_are_taken_as_numbered_and_none_is_dropped(story: Story) -> None:
    story.rank(start=0).steps(100, each=1.0).saved(100).killed()
    story.rank(start=120, attempt=1).restored(100).steps(50, each=1.0, first=100).saved(150).killed()
    story.rank(start=200, attempt=1).restored(150).steps(50, each=1.0, first=150).saved(200).finished()
    ledger = story.ledger()
    assert len(ledger.attempts) == 3
    assert counts(ledger) == (200, 0, 0)


def test_a_rank_that_died_while_others_run_is_told(story: Story) -> None:
    story.rank(1, of=2).steps(100, each=1.0).killed(seen=True)
    stuck = story.rank(0, of=2).steps(100, each=1.0)
    stuck.dies_in_step()
    ledger = story.ledger(now=400, alive=(stuck,))
    assert any("rank 1 is gone since 100 s" in note for note in ledger.notes)
    assert took(ledger, 1)["recover.detection"] == 300


def test_a_preparation_on_several_hosts_is_part_of_the_job(story: Story) -> None:
    for rank, boot in enumerate("ab"):
        story.rank(rank, of=2, start=0, boot=boot, program="prepare.py").wait(30).finished()
        told = story.rank(rank, of=2, start=40, boot=boot).span("process_group_init", 5)
        told.steps(100, each=1.0).saved(100).finished()
    assert story.ledger().wall_ns == 145e9


# --- clocks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [-7200.0, 3600.0])
def test_hosts_with_skewed_clocks_are_aligned_where_the_process_group_was_ready(story: Story, ahead: float) -> None:
    for start in (0, 300):
        story.rank(0, of=2, start=start).span("process_group_init", 10).steps(100, each=1.0).saved(100).killed(True)
        other = story.rank(1, of=2, start=start, boot="boot-1", wall_ahead=ahead)
        other.span("process_group_init", 10).steps(100, each=1.0).killed()
    ledger = story.ledger()
    assert len(ledger.attempts) == 2
    assert ledger.wall_ns == 410e9
    assert took(ledger, 0)["start.trainer_init"] == took(ledger, 1)["start.trainer_init"] == 10


def test_a_wall_clock_that_jumps_changes_nothing(story: Story) -> None:
    first = story.rank(start=0).wait(5)
    first.clock.jump(-86400.0)
    first.steps(100, each=1.0).saved(100).killed()
    story.rank(start=120, wall_ahead=-86400.0).restored(100).steps(50, each=1.0, first=100).saved(150).finished()
    assert took(story.ledger()) == {"start.trainer_init": 5, "recover.detection": 15, "training.effective": 150}


# --- before the trainer --------------------------------------------------------------------------------------------


def test_scheduling_and_hardware_setup_come_from_the_platform(story: Story) -> None:
    rank = story.rank(start=0, launcher="agent", launcher_started_ns=round((5000 - 10) * 1e9))
    rank.scheduled(eligible=-100, allocated=-40).wait(5).steps(10, each=1.0).finished()
    ledger = story.ledger()
    assert took(ledger) == {
        "start.scheduling": 60,
        "start.hardware_setup": 30,
        "start.launcher_init": 10,
        "start.trainer_init": 5,
        "training.effective": 10,
    }
    assert ledger.time_to_start_ns == 105e9
    assert not any("unknown" in note for note in ledger.notes)


def test_without_the_platforms_word_scheduling_is_unknown_and_said_so(story: Story) -> None:
    story.rank().steps(10, each=1.0).finished()
    assert any("scheduling and hardware setup unknown" in note for note in story.ledger().notes)


def test_a_requeued_job_waits_for_its_hardware_again(story: Story) -> None:
    story.rank(start=0).scheduled(-10, 0).steps(100, each=1.0).saved(100).crashed("preempted")
    again = story.rank(start=300).scheduled(150, 280)
    again.restored(100).steps(50, each=1.0, first=100).saved(150).finished()
    assert took(story.ledger()) == {
        "start.scheduling": 10,
        "recover.backoff": 50,
        "recover.scheduling": 130,
        "recover.launcher_init": 20,
        "training.effective": 150,
    }


def test_what_a_supervisor_recorded_wins_over_what_is_inferred(story: Story) -> None:
    supervisor = story.rank(start=-2, role="supervisor")
    supervisor.wait(2)
    story.rank(start=0).steps(100, each=1.0).saved(100).killed()
    supervisor.wait(100).span("detection", 1).span("teardown", 4).span("backoff", 10).span("rendezvous", 2)
    supervisor.killed()
    story.rank(start=120).restored(100).steps(50, each=1.0, first=100).saved(150).finished()
    assert took(story.ledger()) == {
        "recover.detection": 1 + 3,
        "recover.teardown": 4,
        "recover.backoff": 10,
        "recover.rendezvous": 2,
        "training.effective": 150,
    }


@pytest.mark.parametrize(
    ("tell", "expected"),
    [
        (lambda story: story.rank().wait(30), {"start.trainer_init": 30}),
        (lambda story: story.rank().steps(30, each=1.0), {"training.effective": 30}),
        (lambda story: story.rank().steps(20, each=1.0).wait(10), {"training.effective": 20, "unattributed": 10}),
    ],
)
def test_a_job_that_still_runs_is_accounted_up_to_now(
    story: Story, tell: Callable[[Story], object], expected: dict[str, float]
) -> None:
    rank = tell(story)
    ledger = story.ledger(now=30, alive=(rank,))  # type: ignore[arg-type]
    assert took(ledger) == expected
    assert ledger.state == "running"


# --- launchers, and processes that may train ------------------------------------------------------------------------


def trains(story: Story, start: float, **process: object) -> Rank:
    return story.rank(start=start, **process).steps(100, each=1.0).saved(100)  # type: ignore[arg-type]


def test_a_job_begins_with_its_launcher_and_ends_when_that_is_gone(story: Story) -> None:
    launcher = story.launcher(start=-4)
    trains(story, 0).wait(1).finished()
    launcher.wait(110).gone()
    ledger = story.ledger()
    assert took(ledger) == {"start.launcher_init": 4, "training.effective": 100, "shutdown.teardown": 6}
    assert ledger.state == "ended"


def test_hardware_setup_ends_when_the_launcher_starts(story: Story) -> None:
    launcher = story.launcher(start=-10)
    rank = story.rank(start=0, launcher="agent", launcher_started_ns=round((5000 - 8) * 1e9))
    rank.scheduled(eligible=-100, allocated=-40).steps(100, each=1.0).saved(100).finished()
    launcher.wait(110).gone()
    assert took(story.ledger()) == {
        "start.scheduling": 60,
        "start.hardware_setup": 30,
        "start.launcher_init": 10,
        "training.effective": 100,
    }


def test_a_launcher_that_lives_after_a_failure_is_about_to_start_again(story: Story) -> None:
    launcher = story.launcher(start=0)
    trains(story, 0).killed()
    ledger = story.ledger(now=130, alive=(launcher,))
    assert ledger.state == "running"
    assert took(ledger) == {"training.effective": 100, "recover.detection": 30}
    again = story.rank(start=150).restored(100).steps(50, each=1.0, first=100).saved(150)
    again.finished()
    ledger = story.ledger(now=205, alive=(launcher,))
    assert ledger.state == "running"
    assert took(ledger) == {"training.effective": 150, "recover.detection": 50, "shutdown.teardown": 5}


def test_all_ranks_wait_for_the_restart_even_those_that_ended_well(story: Story) -> None:
    launcher = story.launcher(start=0)
    story.rank(0, of=2).steps(100, each=1.0).saved(100).crashed()
    story.rank(1, of=2).steps(100, each=1.0).wait(1).finished()
    ledger = story.ledger(now=130, alive=(launcher,))
    assert took(ledger) == {"training.effective": 100, "shutdown.teardown": 1, "recover.detection": 29}
    assert not any("while others still run" in note for note in ledger.notes)


def test_a_rank_that_vanished_does_not_train_until_its_launcher_is_gone(story: Story) -> None:
    launcher = story.launcher(start=0)
    rank = story.rank().steps(100, each=1.0).saved(100)
    rank.dies_in_step(after=2)
    rank.killed()
    launcher.wait(160).gone(1)
    ledger = story.ledger()
    assert took(ledger) == {"training.effective": 100, "shutdown.teardown": 60}
    assert ledger.failures == [{"attempt": 0, "rank": 0, "unseen_ranks": [], "category": None, "decision": ""}]


def test_a_launcher_that_became_the_rank_tells_how_that_ended(story: Story) -> None:
    launcher = story.launcher(start=-1, pid=77)
    trains(story, 0, pid=77, started_ns=launcher.process.started_ns).finished()
    launcher.wait(103).gone(1)
    ledger = story.ledger()
    assert ledger.state == "failed"
    assert ledger.failures == [{"attempt": 0, "rank": 0, "unseen_ranks": [], "category": None, "decision": ""}]
    assert took(ledger) == {"start.trainer_init": 1, "training.effective": 100, "shutdown.teardown": 2}


def test_a_process_id_that_was_used_again_is_another_process(story: Story) -> None:
    story.launcher(start=-20, pid=77).gone(1)
    trains(story, 0, pid=77).finished()
    assert story.ledger().failures == []


def test_a_program_that_replaced_itself_is_told_from_the_one_that_ended(story: Story) -> None:
    launcher = story.launcher(start=0, pid=77)
    story.rank(start=0, pid=77, program="prepare.py").wait(10).finished()
    trains(story, 10, pid=77).finished()
    launcher.wait(112).gone(3)
    ledger = story.ledger()
    assert len(ledger.attempts) == 1
    assert took(ledger) == {"start.launcher_init": 10, "training.effective": 100, "shutdown.teardown": 2}
    assert ledger.state == "failed"


def test_a_launcher_that_fails_although_its_ranks_ended_well_fails_the_job(story: Story) -> None:
    launcher = story.launcher(start=0)
    trains(story, 0).finished()
    launcher.wait(101).gone(1)
    ledger = story.ledger()
    assert ledger.state == "failed"
    assert ledger.failures == [{"attempt": 0, "rank": None, "unseen_ranks": [], "category": None, "decision": ""}]
    report = summary(ledger)
    assert report["attempts"][0]["error"] == "exit code 1"
    Console(file=StringIO()).print(render(report))
    assert "the launcher: exit code 1" in page(ledger, report)
    assert [moment.text for moment in moments(ledger)] == ["checkpoint saved: step 100", "the launcher failed"]


def test_commands_one_after_the_other_are_one_job_from_the_first_to_the_last(story: Story) -> None:
    story.launcher(start=0).wait(20).gone()
    second = story.launcher(start=30)
    trains(story, 32).killed()
    second.wait(103).gone(1)
    third = story.launcher(start=140)
    again = story.rank(start=144).restored(100).steps(50, each=1.0, first=100).saved(150)
    again.finished()
    third.wait(55).gone()
    story.launcher(start=200).wait(9).gone()
    ledger = story.ledger()
    assert took(ledger) == {
        "start.launcher_init": 32,
        "recover.detection": 1,
        "recover.backoff": 7,
        "recover.launcher_init": 4,
        "training.effective": 150,
        "shutdown.teardown": 15,
    }
    assert [account.outcome for account in ledger.attempts] == ["failed", "ended"]


def test_an_attempt_failed_if_its_launcher_did_before_the_next_began(story: Story) -> None:
    launcher = story.launcher(start=0)
    trains(story, 0).finished()
    launcher.wait(101).gone(1)
    second = story.launcher(start=110)
    story.rank(start=110).restored(100).steps(50, each=1.0, first=100).saved(150).finished()
    second.wait(50).gone()
    ledger = story.ledger()
    assert [account.outcome for account in ledger.attempts] == ["failed", "ended"]
    assert ledger.failures == [{"attempt": 0, "rank": None, "unseen_ranks": [], "category": None, "decision": ""}]


def test_one_launcher_a_node_is_one_job(story: Story) -> None:
    launchers = [story.launcher(start=start, boot=boot) for start, boot in ((-5, "a"), (-3, "b"))]
    for rank, boot in enumerate("ab"):
        story.rank(rank, of=2, boot=boot).span("process_group_init", 2).steps(100, each=1.0).saved(100).finished()
    for launcher, left in zip(launchers, (110, 112), strict=True):
        launcher.wait(left).gone()
    ledger = story.ledger()
    assert took(ledger) == {
        "start.launcher_init": 5,
        "start.trainer_init": 2,
        "training.effective": 100,
        "shutdown.teardown": 7,
    }
    assert ledger.ranks == [0, 1]


def test_a_launcher_of_another_host_is_moved_with_that_hosts_clock(story: Story) -> None:
    launcher = story.launcher(start=0, boot="b", wall_ahead=3600.0)
    story.rank(0, of=2, boot="a").span("process_group_init", 2).steps(100, each=1.0).saved(100).finished()
    other = story.rank(1, of=2, boot="b", wall_ahead=3600.0)
    other.span("process_group_init", 2).steps(100, each=1.0).finished()
    launcher.wait(105).gone()
    assert story.ledger().wall_ns == 105e9


def test_a_job_of_which_only_the_launcher_is_known_says_so(story: Story) -> None:
    launcher = story.launcher(start=0, of=8)
    assert took(story.ledger(now=10, alive=(launcher,))) == {"unattributed": 10}
    launcher.wait(30).gone(2)
    ledger = story.ledger()
    assert took(ledger) == {"unattributed": 30}
    assert ledger.state == "failed"
    assert ledger.failures == [{"attempt": 0, "rank": None, "unseen_ranks": [], "category": None, "decision": ""}]
    assert any(note.startswith("no PyTorch training was seen in this job") for note in ledger.notes)


def test_launchers_alone_one_after_the_other_end_as_the_last_one_did(story: Story) -> None:
    story.launcher(start=0).wait(30).gone(2)
    story.launcher(start=40).wait(30).gone()
    ledger = story.ledger()
    assert took(ledger) == {"unattributed": 70}
    assert ledger.state == "ended"


def test_a_process_beside_a_rank_is_no_rank(story: Story) -> None:
    agent = story.rank(start=0, role="process", program="torchrun").wait(2)
    rank = story.rank(start=2, role="process").wait(5).becomes()
    story.rank(start=10, role="process", program="helper.py").wait(30).crashed()
    rank.steps(100, each=1.0).saved(100).finished()
    agent.wait(120).finished()
    ledger = story.ledger()
    assert len(ledger.attempts) == 1
    assert took(ledger) == {"start.trainer_init": 5, "training.effective": 100}


def test_a_process_that_becomes_a_rank_keeps_its_begin(story: Story) -> None:
    rank = story.rank(start=0, role="process").wait(8).becomes(1, of=2).steps(10, each=1.0)
    rank.finished()
    ledger = story.ledger()
    assert took(ledger) == {"start.trainer_init": 8, "training.effective": 10}
    assert sorted(ledger.attempts[0].views) == [1]
    assert ledger.ranks == [0, 1]


def test_processes_before_and_after_the_training_prepare_and_follow_it(story: Story) -> None:
    story.rank(start=0, role="process", program="prepare.py").wait(30).finished()
    trains(story, 40).finished()
    story.rank(start=150, role="process", program="export.py").wait(40).finished()
    ledger = story.ledger()
    assert took(ledger) == {"start.launcher_init": 40, "training.effective": 100, "shutdown.teardown": 50}
    assert len(ledger.attempts) == 1


def test_a_process_after_a_failed_rank_is_the_next_attempt_before_it_trains(story: Story) -> None:
    agent = story.rank(start=0, role="process", program="torchrun")
    trains(story, 0).killed()
    again = story.rank(start=120, role="process")
    ledger = story.ledger(now=125, alive=(agent, again))
    assert [account.outcome for account in ledger.attempts] == ["failed", "running"]
    assert took(ledger) == {"training.effective": 100, "recover.detection": 20, "recover.trainer_init": 5}


def test_a_worker_that_dies_before_it_trains_beside_one_that_does_is_a_rank_too(story: Story) -> None:
    story.rank(0, of=2, launcher="agent").steps(10, each=1.0).wait(5).crashed("RuntimeError: connection reset by peer")
    story.rank(1, of=2, launcher="agent", role="process").wait(3).crashed("ImportError: no")
    ledger = story.ledger()
    assert ledger.ranks == sorted(ledger.attempts[0].views) == [0, 1]
    assert ledger.failures[0]["rank"] == 1


def test_without_ranks_the_process_that_started_no_other_is_the_job(story: Story) -> None:
    agent = story.rank(start=0, role="process", program="torchrun").wait(1)
    worker = story.rank(start=1, role="process").wait(9)
    worker.crashed("ImportError: no")
    agent.wait(20).finished()
    ledger = story.ledger()
    assert [account.outcome for account in ledger.attempts] == ["failed"]
    assert took(ledger) == {"start.trainer_init": 9}


def test_without_ranks_siblings_are_all_part_of_the_job(story: Story) -> None:
    agent = story.rank(start=0, role="process", program="torchrun")
    workers = [story.rank(n, of=2, start=1 + n, role="process", launcher="agent") for n in (0, 1)]
    ledger = story.ledger(now=30, alive=(agent, *workers))
    assert sorted(ledger.attempts[0].views) == [0, 1]
    assert [name for name in ledger.notes if "no journal" in name] == []


def test_processes_one_after_the_other_that_never_trained_are_what_they_were(story: Story) -> None:
    story.rank(start=0, role="process", program="prepare.py").wait(10).finished()
    story.rank(start=12, role="process", program="export.py").wait(10).finished()
    ledger = story.ledger()
    assert len(ledger.attempts) == 1
    assert took(ledger) == {"start.launcher_init": 12, "start.trainer_init": 10}


# --- what hooks found out ------------------------------------------------------------------------------------------


def test_advice_names_the_slow_imports_and_the_one_an_optimizer_hides(story: Story) -> None:
    rank = story.rank().span("imports", 30).wait(1)
    rank.recorder.mark("imports", seconds={"transformers": 20.0, "torch": 6.0, "torch._dynamo": 4.0, "numpy": 0.5})
    rank.steps(20, each=1.0).finished()
    titles = [advice.title for advice in advise(story.ledger())]
    assert "have imports done before they are needed: transformers 20.0 s, torch 6.0 s, torch._dynamo 4.0 s" in titles
    assert any("the first optimizer imports it (4.0 s)" in title for title in titles)


def test_advice_names_the_function_that_is_compiled_again_and_why(story: Story) -> None:
    rank = story.rank().steps(20, each=1.0)
    for number in range(3):
        rank.span("pt2_compilation", 5).steps(5, each=1.0)
        reason = f"tensor 'x' size mismatch, actual {number}"
        rank.recorder.mark("compiled", function="forward (train.py:14)", seconds=5.0, reason=reason)
    rank.recorder.mark("compiled", function="step (train.py:40)", seconds=9.0, reason="")
    rank.finished()
    (title,) = [a.title for a in advise(story.ledger()) if a.bucket == Bucket.WASTE_RECOMPILATION]
    assert title.endswith(": forward (train.py:14) 3 times, the last because tensor 'x' size mismatch, actual 2")


def test_what_hooks_say_of_themselves_is_noted_once(story: Story) -> None:
    for number in range(2):
        rank = story.rank(number, of=2).steps(5, each=1.0)
        rank.recorder.mark("hook_off", hook="torch.save", error="ValueError: no")
        rank.recorder.mark("asynchronous_device", device="cuda", looked=0)
        if number:
            rank.recorder.mark("asynchronous_device", device="cuda", looked=7)
        rank.finished()
    notes = story.ledger().notes
    assert sum("torch.save was switched off (ValueError: no)" in note for note in notes) == 1
    assert any("(cuda): what it felt of waits for data is known from 7 of them" in note for note in notes)


def test_loading_after_the_last_step_is_shutdown_and_no_recovery(story: Story) -> None:
    story.rank().steps(10, each=1.0).span("checkpoint_restore", 5).finished()
    ledger = story.ledger()
    assert ledger.buckets[Bucket.SHUTDOWN_TEARDOWN] == 5_000_000_000
    assert ledger.times_to_recover_ns == []


def test_a_launcher_that_failed_belongs_to_its_own_attempt_even_if_the_next_seems_to_start_before_its_end(
    story: Story,
) -> None:
    for start in (0.0, 20.0):
        launcher = story.launcher(start=start)
        rank = story.rank(start=start).wait(1).steps(10, each=1.0)
        rank.finished()
        launcher.wait(20.005 - start if start == 0.0 else 15.0).gone(1 if start == 0.0 else 0)
    ledger = story.ledger()
    assert [account.outcome for account in ledger.attempts] == ["failed", "ended"]


def test_a_first_step_whose_begin_nobody_saw_is_a_typical_one(story: Story) -> None:
    rank = story.rank().span("train_module_creation", 5).wait(0.5).span("pt2_compilation", 20).wait(1.5)
    meter = rank.recorder.steps_meter
    meter.open(at_ns=rank.clock.now_ns())
    meter.step(rank.clock.now_ns(), 0, rank.clock.now_ns())
    for _ in range(50):
        rank.wait(1.0)
        meter.step(rank.clock.now_ns(), 0, rank.clock.now_ns())
    rank.finished()
    ledger = story.ledger()
    assert ledger.steps[Bucket.TRAINING_EFFECTIVE] == 51
    assert ledger.buckets[Bucket.TRAINING_EFFECTIVE] == 51_000_000_000
    assert ledger.buckets[Bucket.START_TRAINER_INIT] == 6_000_000_000
    assert sum(ledger.buckets.values()) == ledger.wall_ns


def test_a_job_that_ended_without_a_step_says_so(story: Story) -> None:
    story.rank().wait(5).finished()
    assert any("no training step was seen" in note for note in story.ledger().notes)

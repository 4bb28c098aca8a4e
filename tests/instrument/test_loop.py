"""Steps made of fetches and optimizer steps, on a clock turned by hand: what is a step, a wait, an evaluation."""

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.accounting.ledger import Ledger
from headway.accounting.rules import Bucket
from headway.events.vocabulary import Restored, Saved
from headway.instrument.devices import EVERY, DeviceWaits
from headway.instrument.hooks import look_at_device
from headway.instrument.loop import TAKEOVER, Loader, Pass, Tracker
from headway.instrument.past import Load
from headway.testing import Story


class Optimizer:
    """As much of one as is looked at."""

    def __init__(self, steps: int | None = None) -> None:
        self.state: dict[str, dict[str, Any]] = {"weight": {"step": steps}} if steps is not None else {}

    def counts(self) -> "Optimizer":
        for state in self.state.values():
            state["step"] += 1
        return self


class Model:
    def __init__(self) -> None:
        self.training = True


class Scene:
    """One process that trains, without torch."""

    def __init__(self, story: Story, start: float = 0.0) -> None:
        self.story = story
        self.rank = story.rank(start=start)
        self.clock = self.rank.clock
        self.grads = True
        self.tracker = Tracker(self.rank.recorder, lambda: self.grads)
        self.optimizer = Optimizer()

    def fetch(self, way: Pass, wait: float) -> None:
        asked = self.tracker.fetching(way)
        assert asked is not None
        self.clock.advance(wait)
        self.tracker.fetched(way, asked)

    def stop(self, way: Pass, wait: float = 0.0) -> None:
        asked = self.tracker.fetching(way)
        assert asked is not None
        self.clock.advance(wait)
        self.tracker.exhausted(way, asked)

    def step(self, work: float, *optimizers: Optimizer) -> None:
        self.clock.advance(work)
        for optimizer in optimizers or (self.optimizer,):
            self.tracker.stepped(optimizer.counts())

    def epoch(self, loader: Loader, batches: int, wait: float, work: float, after: float = 0.0) -> None:
        way = self.tracker.begins(loader)
        for _ in range(batches):
            self.fetch(way, wait)
            self.step(work)
            self.clock.advance(after)
        self.stop(way)

    def look(self, loader: Loader, batches: int, each: float) -> None:
        way = self.tracker.begins(loader)
        for _ in range(batches):
            self.fetch(way, each)
        self.stop(way)

    def ends(self) -> None:
        self.tracker.finish()
        self.rank.finished()

    def ledger(self) -> Ledger:
        return self.story.ledger()


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(Story(tmp_path))


def seconds(ledger: Ledger, bucket: Bucket) -> float:
    return round(ledger.buckets[bucket] / 1e9, 6)


def trained(ledger: Ledger) -> tuple[float, float, float]:
    """Time in steps, waiting for data, and the number of new steps."""
    effective, waiting = seconds(ledger, Bucket.TRAINING_EFFECTIVE), seconds(ledger, Bucket.WASTE_DATA_WAIT)
    return effective, waiting, ledger.steps[Bucket.TRAINING_EFFECTIVE]


def test_a_loop_over_a_loader(scene: Scene) -> None:
    scene.clock.advance(3)
    scene.epoch(Loader(), 10, wait=0.5, work=2.0, after=0.25)
    scene.ends()
    ledger = scene.ledger()
    assert trained(ledger) == (10 * 2.25, 9 * 0.5, 10)
    assert seconds(ledger, Bucket.START_TRAINER_INIT) == 3.5
    assert seconds(ledger, Bucket.UNATTRIBUTED) == 0


def test_epochs_follow_one_another(scene: Scene) -> None:
    loader = Loader()
    for _ in range(3):
        scene.epoch(loader, 10, wait=0.5, work=2.0)
    scene.ends()
    assert trained(scene.ledger()) == (60.0, 29 * 0.5, 30)


def test_work_between_epochs_is_not_training(scene: Scene) -> None:
    loader = Loader()
    for _ in range(2):
        scene.epoch(loader, 10, wait=0.0, work=1.0)
        scene.clock.advance(4)
    scene.ends()
    ledger = scene.ledger()
    assert trained(ledger) == (20.0, 0, 20)
    assert seconds(ledger, Bucket.UNATTRIBUTED) == 4
    assert seconds(ledger, Bucket.SHUTDOWN_TEARDOWN) == 4


def test_work_after_the_last_step_is_shutdown_even_if_the_loader_is_never_finished(scene: Scene) -> None:
    way = scene.tracker.begins(Loader())
    for _ in range(5):
        scene.fetch(way, 0.1)
        scene.step(1.0)
    scene.clock.advance(60)
    scene.ends()
    ledger = scene.ledger()
    assert trained(ledger)[0] == 5.0
    assert seconds(ledger, Bucket.SHUTDOWN_TEARDOWN) == 60


def test_a_kill_in_work_after_the_last_step_loses_no_step(scene: Scene) -> None:
    way = scene.tracker.begins(Loader())
    for _ in range(5):
        scene.fetch(way, 0.0)
        scene.step(1.0)
    scene.rank.saved(5)
    del way
    scene.clock.advance(60)
    with scene.rank.during("publish"):
        scene.clock.advance(1)
        scene.rank.killed()
    ledger = scene.ledger()
    assert trained(ledger)[0] == 5.0
    assert seconds(ledger, Bucket.WASTE_UNSAVED_STEPS) == 0


def test_a_hang_between_two_steps_is_a_stall(scene: Scene) -> None:
    way = scene.tracker.begins(Loader())
    for _ in range(30):
        scene.fetch(way, 0.0)
        scene.step(1.0)
    scene.clock.advance(60)
    scene.rank.recorder.mark("sign of life")
    scene.rank.killed()
    assert seconds(scene.ledger(), Bucket.WASTE_STALL) == 59.0


def test_gradient_accumulation_is_one_step_of_several_batches(scene: Scene) -> None:
    way = scene.tracker.begins(Loader(8))
    for _ in range(10):
        for _ in range(4):
            scene.fetch(way, 0.1)
            scene.clock.advance(1.0)
        scene.step(0.5)
    scene.stop(way)
    scene.ends()
    assert trained(scene.ledger()) == (10 * 4.5, round(9 * 0.4 + 0.3, 6) - 0.3, 10)


def test_two_optimizers_are_one_step(scene: Scene) -> None:
    generator, discriminator = Optimizer(), Optimizer()
    way = scene.tracker.begins(Loader())
    for _ in range(10):
        scene.fetch(way, 0.0)
        scene.step(1.0, discriminator)
        scene.step(1.0, generator)
    scene.stop(way)
    scene.ends()
    assert trained(scene.ledger()) == (20.0, 0, 10)


def test_an_optimizer_for_each_parameter_is_one_step(scene: Scene) -> None:
    optimizers = [Optimizer() for _ in range(300)]
    way = scene.tracker.begins(Loader())
    for _ in range(10):
        scene.fetch(way, 0.0)
        scene.step(1.0, *optimizers)
    scene.stop(way)
    scene.ends()
    assert trained(scene.ledger()) == (10.0, 0, 10)


def test_a_skipped_step_joins_the_next(scene: Scene) -> None:
    way = scene.tracker.begins(Loader())
    for number in range(10):
        scene.fetch(way, 0.5)
        if number in (5, 6):  # the gradient scaler found an infinity
            scene.clock.advance(1.0)
            scene.tracker.skipped()
        else:
            scene.step(1.0)
    scene.stop(way)
    scene.ends()
    assert trained(scene.ledger()) == (10.0, 4.5, 8)


def test_a_batch_without_a_step_where_each_had_one_is_left_out(scene: Scene) -> None:
    way = scene.tracker.begins(Loader())
    for number in range(20):
        scene.fetch(way, 0.5)
        if number in (9, 15):  # it raised, and the program goes on
            scene.clock.advance(1.0)
        else:
            scene.step(1.0)
    scene.stop(way)
    scene.ends()
    ledger = scene.ledger()
    assert trained(ledger) == (18.0, 9.5, 18)
    assert seconds(ledger, Bucket.WASTE_UNSAVED_STEPS) == 2.0


def test_a_program_that_begins_to_accumulate_gradients_leaves_no_batch_out(scene: Scene) -> None:
    way = scene.tracker.begins(Loader())
    for number in range(40):
        for _ in range(1 if number < 10 else 3):
            scene.fetch(way, 0.0)
            scene.clock.advance(0.5)
        scene.step(0.5)
    scene.stop(way)
    scene.ends()
    assert seconds(scene.ledger(), Bucket.WASTE_UNSAVED_STEPS) <= 1.0


def test_a_lead_that_falls_silent_is_replaced(scene: Scene) -> None:
    warm_up, main = Optimizer(), Optimizer()
    way = scene.tracker.begins(Loader())
    for number in range(20):
        scene.fetch(way, 0.0)
        scene.step(1.0, warm_up if number < 5 else main)
    scene.stop(way)
    scene.ends()
    assert trained(scene.ledger()) == (20.0, 0, 20)


def test_a_lead_that_falls_silent_in_a_loop_without_a_loader_is_replaced_after_a_while(scene: Scene) -> None:
    warm_up, main = Optimizer(), Optimizer()
    for number in range(20):
        scene.step(1.0, warm_up if number < 5 else main)
    scene.ends()
    assert trained(scene.ledger()) == (20.0, 0, 20 - (TAKEOVER - 1))


def test_a_lead_that_is_gone_is_replaced_at_once(scene: Scene) -> None:
    way = scene.tracker.begins(Loader())
    for _ in range(4):
        scene.fetch(way, 0.0)
        scene.step(1.0)
    scene.optimizer = Optimizer()
    for _ in range(4):
        scene.fetch(way, 0.0)
        scene.step(1.0)
    scene.ends()
    assert trained(scene.ledger())[2] == 8


def test_batches_asked_ahead_are_trained_after_the_loader_is_empty(scene: Scene) -> None:
    loader = Loader()
    for _ in range(2):
        way = scene.tracker.begins(loader)
        scene.fetch(way, 0.2)
        for number in range(10):
            scene.fetch(way, 0.2) if number < 9 else scene.stop(way)
            scene.step(1.0)
    scene.ends()
    assert trained(scene.ledger())[2] == 20
    assert trained(scene.ledger())[0] == pytest.approx(20.0)


def test_a_loop_without_a_loader_is_measured_from_step_to_step(scene: Scene) -> None:
    scene.clock.advance(2)
    for _ in range(11):
        scene.step(1.5)
    scene.ends()
    ledger = scene.ledger()
    assert trained(ledger) == (16.5, 0, 11)  # the first step's begin is not known: it is taken to be a typical one
    assert seconds(ledger, Bucket.START_TRAINER_INIT) == 2.0


def test_one_batch_asked_of_a_new_iterator_each_time_is_training(scene: Scene) -> None:
    loader = Loader()
    for _ in range(10):
        way = scene.tracker.begins(loader)
        scene.fetch(way, 0.5)
        del way
        scene.step(1.0)
    scene.ends()
    assert trained(scene.ledger()) == (10.0, 4.5, 10)


def test_two_loaders_side_by_side_both_train(scene: Scene) -> None:
    ways = [scene.tracker.begins(Loader()), scene.tracker.begins(Loader())]
    for _ in range(10):
        for way in ways:
            scene.fetch(way, 0.25)
        scene.step(1.0)
    scene.ends()
    assert trained(scene.ledger()) == (10.0, 4.5, 10)


def test_a_second_loader_that_begins_again_inside_of_a_step_does_not_end_the_loop(scene: Scene) -> None:
    first, loader = scene.tracker.begins(Loader()), Loader()
    second = scene.tracker.begins(loader)
    for number in range(30):
        scene.fetch(first, 0.25)
        if number % 10 == 9:
            scene.stop(second)
            second = scene.tracker.begins(loader)
        scene.fetch(second, 0.25)
        scene.step(1.0)
    scene.ends()
    assert trained(scene.ledger()) == (30.0, 29 * 0.5, 30)


def test_a_loop_that_is_left_by_break_ends_with_its_last_step(scene: Scene) -> None:
    loader = Loader()
    for _ in range(2):
        way = scene.tracker.begins(loader)
        for _ in range(5):
            scene.fetch(way, 0.0)
            scene.step(1.0)
        scene.fetch(way, 0.0)
        del way
        scene.clock.advance(7)
    scene.ends()
    ledger = scene.ledger()
    assert trained(ledger) == (10.0, 0, 10)
    assert seconds(ledger, Bucket.UNATTRIBUTED) == 7


# --- evaluation ----------------------------------------------------------------------------------------------------


def test_a_loader_read_without_steps_is_evaluation(scene: Scene) -> None:
    train, validate = Loader(), Loader()
    for _ in range(2):
        scene.epoch(train, 10, wait=0.0, work=1.0)
        scene.look(validate, 5, each=1.0)
    scene.ends()
    ledger = scene.ledger()
    assert trained(ledger)[0] == 20.0
    assert seconds(ledger, Bucket.WASTE_EVALUATION) == 10.0


def test_evaluation_in_the_middle_of_a_loop(scene: Scene) -> None:
    train, validate = Loader(), Loader()
    way = scene.tracker.begins(train)
    for number in range(20):
        scene.fetch(way, 0.0)
        scene.step(1.0)
        if number == 10:
            scene.look(validate, 5, each=1.0)
    scene.stop(way)
    scene.ends()
    ledger = scene.ledger()
    assert trained(ledger) == (20.0, 0, 20)
    assert seconds(ledger, Bucket.WASTE_EVALUATION) == 5.0


def test_what_follows_the_last_evaluation_up_to_a_save_is_part_of_it(scene: Scene) -> None:
    model = Model()
    scene.epoch(Loader(), 10, wait=0.0, work=1.0)
    model.training = False
    scene.tracker.evaluation.to_evaluation_mode(model)
    scene.look(Loader(), 5, each=1.0)
    scene.clock.advance(4.0)  # the ranks wait for one another, and add up what they found
    scene.tracker.evaluation.saves()
    scene.clock.advance(3.0)
    scene.ends()
    ledger = scene.ledger()
    assert seconds(ledger, Bucket.WASTE_EVALUATION) == 9.0
    assert seconds(ledger, Bucket.SHUTDOWN_TEARDOWN) == 3.0


def test_what_follows_a_save_up_to_the_next_batch_is_part_of_it_but_for_an_evaluation(scene: Scene) -> None:
    validate = Loader()
    way = scene.tracker.begins(Loader())
    for number in range(20):
        scene.fetch(way, 0.0)
        scene.step(1.0)
        scene.clock.advance(0.5)
        if number in (9, 14):
            scene.tracker.saved()
            scene.clock.advance(3.0)
            scene.look(validate, 2, each=1.0)
    scene.stop(way)
    scene.ends()
    ledger = scene.ledger()
    assert seconds(ledger, Bucket.WASTE_CHECKPOINT_BLOCKING) == 6.0
    assert seconds(ledger, Bucket.WASTE_EVALUATION) == 4.0
    assert trained(ledger) == (20 * 1.5, 0, 20)


@pytest.mark.parametrize("sign", ["gradients are off", "the model evaluates"])
def test_evaluation_with_a_sign_is_known_while_it_runs(scene: Scene, sign: str) -> None:
    model = Model()
    scene.epoch(Loader(), 10, wait=0.0, work=1.0)
    if sign == "gradients are off":
        scene.grads = False
    else:
        model.training = False
        scene.tracker.evaluation.to_evaluation_mode(model)
    way = scene.tracker.begins(Loader())
    scene.fetch(way, 3.0)
    scene.clock.advance(2.0)
    scene.rank.recorder.mark("sign of life")
    scene.rank.killed()
    assert seconds(scene.ledger(), Bucket.WASTE_EVALUATION) == 5.0


def test_evaluation_without_a_loader_lasts_as_long_as_the_model_is_in_evaluation_mode(scene: Scene) -> None:
    model = Model()
    for number in range(20):
        scene.step(1.0)
        if number == 10:
            scene.grads = False
            scene.tracker.evaluation.to_evaluation_mode(model)
            scene.clock.advance(5.0)
            assert scene.tracker.evaluation.to_training_mode(model)
            scene.grads = True
    scene.ends()
    ledger = scene.ledger()
    assert trained(ledger)[0] == 20.0
    assert seconds(ledger, Bucket.WASTE_EVALUATION) == 5.0


def test_a_part_that_goes_to_evaluation_and_back_inside_of_a_step_does_not_evaluate(scene: Scene) -> None:
    discriminator = Model()
    for _ in range(20):
        scene.tracker.evaluation.to_evaluation_mode(discriminator)
        scene.clock.advance(1.0)
        scene.tracker.evaluation.computes_gradients()
        scene.tracker.evaluation.to_training_mode(discriminator)
        scene.step(1.0)
    scene.ends()
    ledger = scene.ledger()
    assert trained(ledger)[0] == 40.0
    assert seconds(ledger, Bucket.WASTE_EVALUATION) == 0


def test_another_optimizer_for_another_model_brings_nothing_back(scene: Scene) -> None:
    for _ in range(3):
        scene.optimizer = Optimizer(0)
        way = scene.tracker.begins(Loader())
        for _ in range(30):
            scene.fetch(way, 0.0)
            scene.step(1.0)
        scene.stop(way)
    scene.ends()
    ledger = scene.ledger()
    assert ledger.steps[Bucket.WASTE_REPEATED_STEPS] == 0
    assert trained(ledger)[0] == 90.0


def test_a_part_that_stays_in_evaluation_mode_while_others_train_does_not_evaluate(scene: Scene) -> None:
    teacher = Model()
    scene.tracker.evaluation.to_evaluation_mode(teacher)
    teacher.training = False
    scene.epoch(Loader(), 5, wait=0.0, work=1.0)
    scene.tracker.evaluation.to_evaluation_mode(teacher)
    scene.epoch(Loader(), 5, wait=0.0, work=1.0)  # a new loader, while the teacher is in evaluation mode
    scene.ends()
    ledger = scene.ledger()
    assert trained(ledger)[2] == 10
    assert seconds(ledger, Bucket.WASTE_EVALUATION) <= 1.0  # until the first step shows that it trains


def test_an_evaluation_that_is_never_finished_does_not_make_its_loader_train(scene: Scene) -> None:
    validate = Loader()
    scene.grads = False
    kept = scene.tracker.begins(validate)
    scene.fetch(kept, 1.0)
    scene.grads = True
    scene.epoch(Loader(), 5, wait=0.0, work=1.0)
    scene.look(validate, 5, each=1.0)
    scene.ends()
    ledger = scene.ledger()
    assert trained(ledger) == (5.0, 0, 5)
    assert seconds(ledger, Bucket.WASTE_EVALUATION) == pytest.approx(6.0, abs=1.0)


def test_what_lies_between_an_empty_loader_and_another_is_no_step(scene: Scene) -> None:
    for _ in range(2):
        scene.epoch(Loader(), 5, wait=0.0, work=1.0)
        scene.clock.advance(20)
    scene.ends()
    ledger = scene.ledger()
    assert trained(ledger) == (10.0, 0, 10)
    assert seconds(ledger, Bucket.UNATTRIBUTED) == 20


def test_the_first_wait_for_each_new_loader_counts(scene: Scene) -> None:
    for _ in range(3):
        scene.epoch(Loader(), 5, wait=0.5, work=1.0)
    scene.ends()
    assert trained(scene.ledger()) == (15.0, 14 * 0.5, 15)


def test_a_batch_of_another_loader_in_the_middle_of_training_does_not_make_that_train(scene: Scene) -> None:
    train, validate = Loader(), Loader()
    way = scene.tracker.begins(train)
    for number in range(20):
        scene.fetch(way, 0.0)
        scene.step(1.0)
        if number % 5 == 2:
            glance = scene.tracker.begins(validate)
            scene.fetch(glance, 0.5)
            del glance
    scene.stop(way)
    scene.look(validate, 5, each=1.0)
    scene.ends()
    ledger = scene.ledger()
    assert trained(ledger) == (20.0, 0, 20)
    assert seconds(ledger, Bucket.WASTE_EVALUATION) == 7.0


def test_a_loader_read_before_any_training_is_preparation(scene: Scene) -> None:
    scene.look(Loader(), 5, each=1.0)
    scene.epoch(Loader(), 5, wait=0.0, work=1.0)
    scene.ends()
    stages = {key[1]: ns / 1e9 for key, ns in scene.ledger().sums.items() if key[1]}
    assert stages["preproc_creation"] == 5.0


def test_a_script_that_measures_its_own_steps_is_left_alone(scene: Scene) -> None:
    way = scene.tracker.begins(Loader())
    for _ in scene.rank.recorder.steps(range(10)):
        scene.fetch(way, 0.5)
        scene.step(1.0)
    scene.stop(way)
    scene.ends()
    ledger = scene.ledger()
    assert ledger.steps[Bucket.TRAINING_EFFECTIVE] == 10
    assert seconds(ledger, Bucket.TRAINING_EFFECTIVE) == 15.0
    assert seconds(ledger, Bucket.WASTE_EVALUATION) == 0


@pytest.mark.parametrize("gradients", [True, False])
def test_a_pass_over_the_training_loader_without_a_step_is_evaluation(scene: Scene, gradients: bool) -> None:
    train = Loader()
    for _ in range(3):
        scene.epoch(train, 10, wait=0.0, work=1.0)
        scene.grads = gradients
        scene.look(train, 10, each=0.5)
        scene.grads = True
    scene.ends()
    ledger = scene.ledger()
    assert trained(ledger) == (30.0, 0, 30)
    assert seconds(ledger, Bucket.WASTE_EVALUATION) == 15.0


@pytest.mark.parametrize(("gradients", "has_loader"), [(True, True), (False, True), (False, False)])
def test_an_iterator_kept_open_and_drawn_from_now_and_then_is_evaluation(
    scene: Scene, gradients: bool, has_loader: bool
) -> None:
    """With gradients on at the fetch, and no loader to train from, nothing tells it from training."""
    train, validate = scene.tracker.begins(Loader()), scene.tracker.begins(Loader())
    for number in range(40):
        if has_loader:
            scene.fetch(train, 0.0)
        scene.step(1.0)
        if number % 10 == 9:
            scene.grads = gradients
            scene.fetch(validate, 0.0)
            scene.clock.advance(5.0)
            scene.grads = True
    scene.ends()
    ledger = scene.ledger()
    lost_last = 5.0  # no step follows the last one
    assert trained(ledger)[0] == pytest.approx(40.0, abs=1.0)
    assert seconds(ledger, Bucket.WASTE_EVALUATION) + seconds(ledger, Bucket.SHUTDOWN_TEARDOWN) >= 20.0 - lost_last


def test_a_loop_that_fetches_its_batches_while_gradients_are_off_trains(scene: Scene) -> None:
    way = scene.tracker.begins(Loader())
    for _ in range(20):
        scene.grads = False
        scene.fetch(way, 0.5)
        scene.grads = True
        scene.step(1.0)
    scene.stop(way)
    scene.ends()
    assert trained(scene.ledger()) == (20.0, 19 * 0.5, 20)


def test_clients_that_train_in_turns_on_few_batches_each_all_train(scene: Scene) -> None:
    clients = [(Optimizer(), Loader()) for _ in range(4)]
    for _ in range(5):
        for optimizer, loader in clients:
            way = scene.tracker.begins(loader)
            for _ in range(2):
                scene.fetch(way, 0.0)
                scene.step(1.0, optimizer)
            scene.stop(way)
    scene.ends()
    ledger = scene.ledger()
    assert trained(ledger) == (40.0, 0, 40)
    assert seconds(ledger, Bucket.WASTE_EVALUATION) == 0


def test_a_step_before_the_data_is_there_is_a_warm_up(scene: Scene) -> None:
    scene.step(1.0)
    scene.clock.advance(30)
    scene.epoch(Loader(), 10, wait=0.0, work=1.0)
    scene.ends()
    ledger = scene.ledger()
    assert trained(ledger)[0] == 10.0
    assert seconds(ledger, Bucket.START_TRAINER_INIT) == 31.0


def test_a_model_that_plays_in_evaluation_mode_collects_what_it_trains_on(scene: Scene) -> None:
    policy = Model()
    for _ in range(10):
        for _ in range(5):
            scene.step(1.0)
        scene.tracker.evaluation.to_evaluation_mode(policy, plays=True)
        scene.clock.advance(3.0)
        scene.tracker.evaluation.to_training_mode(policy)
    scene.step(1.0)
    scene.ends()
    ledger = scene.ledger()
    assert trained(ledger)[0] == 81.0
    assert seconds(ledger, Bucket.WASTE_EVALUATION) == 0


# --- threads -------------------------------------------------------------------------------------------------------


def test_batches_fetched_in_another_thread_are_no_wait(scene: Scene) -> None:
    way = scene.tracker.begins(Loader())
    for _ in range(10):
        other = threading.Thread(target=scene.fetch, args=(way, 0.5))
        other.start()
        other.join()
        scene.step(1.0)
    scene.ends()
    assert trained(scene.ledger())[1:] == (0, 10)


def test_an_optimizer_that_steps_in_another_thread_still_ends_steps(scene: Scene) -> None:
    way = scene.tracker.begins(Loader())
    for _ in range(10):
        scene.fetch(way, 0.5)
        other = threading.Thread(target=scene.step, args=(1.0,))
        other.start()
        other.join()
    scene.ends()
    assert trained(scene.ledger()) == (10.0, 4.5, 10)


# --- resuming ------------------------------------------------------------------------------------------------------


def saved(scene: Scene, path: str, file: str = "") -> None:
    scene.rank.recorder.record(Saved(t_ns=scene.clock.now_ns(), step=scene.tracker.steps_done, path=path, file=file))


@pytest.mark.parametrize("how", ["the same path", "a renamed file", "the optimizer's own count"])
def test_a_resume_repeats_what_was_not_saved(tmp_path: Path, how: str) -> None:
    story = Story(tmp_path)
    first = Scene(story)
    first.optimizer = Optimizer(0)
    way = first.tracker.begins(Loader())
    for number in range(30):
        first.fetch(way, 0.0)
        first.step(1.0)
        if number == 19:
            saved(first, "/c/step.pt", "1:2")
    first.rank.killed()
    second = Scene(story, start=40)
    second.optimizer = Optimizer(20 if how == "the optimizer's own count" else None)
    second.tracker.past.loads = [
        {"the same path": Load("/c/step.pt"), "a renamed file": Load("/c/last.pt", "1:2")}.get(how, Load("/elsewhere"))
    ]
    second.tracker.past.filled(optimizer=second.optimizer)
    second.epoch(Loader(), 30, wait=0.0, work=1.0)
    saved(second, "/c/step.pt")
    second.ends()
    ledger = story.ledger()
    assert seconds(ledger, Bucket.WASTE_REPEATED_STEPS) == 10.0
    assert trained(ledger)[0] == 50.0


def test_a_load_that_nobody_saved_is_a_start_from_scratch(tmp_path: Path) -> None:
    scene = Scene(Story(tmp_path))
    scene.tracker.past.loads = [Load("/pretrained.pt", "9:9")]
    scene.epoch(Loader(), 10, wait=0.0, work=1.0)
    scene.ends()
    ledger = scene.ledger()
    assert trained(ledger)[2] == 10
    records = [r for _, batch in scene.story.reader.poll() for r in batch.records if isinstance(r, Restored)]
    assert all(record.step is None for record in records)


# --- devices -------------------------------------------------------------------------------------------------------


class Device:
    """A queue of work that runs by itself, and events in it."""

    def __init__(self, clock: Any) -> None:
        self.clock, self.busy_until = clock, 0

    def event(self, **options: Any) -> "Event":
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device

    def record(self) -> None:
        self.at = max(self.device.busy_until, self.device.clock.now_ns())

    def query(self) -> bool:
        return self.device.clock.now_ns() >= self.at

    def elapsed_time(self, other: "Event") -> float:
        return (other.at - self.at) / 1e6


@pytest.mark.parametrize(("busy", "felt"), [(10.0, 0.0), (1.0, 0.5), (0.0, 1.0)])
def test_a_device_feels_only_the_waits_it_stands_idle_in(scene: Scene, busy: float, felt: float) -> None:
    """Each step queues work; the host then waits 2 s for data, while the device has `busy` seconds left."""
    device = Device(scene.clock)
    scene.tracker.device = DeviceWaits(device.event)
    way = scene.tracker.begins(Loader())
    count = 20 * EVERY
    for _ in range(count):
        scene.fetch(way, 2.0)
        scene.step(0.1)
        device.busy_until = scene.clock.now_ns() + round(busy * 1e9)
    scene.stop(way)
    scene.ends()
    waiting = trained(scene.ledger())[1]
    assert waiting == pytest.approx(felt * 2.0 * count, rel=0.1, abs=2.0 * EVERY)


def test_a_model_on_an_accelerator_gets_its_waits_from_events(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(scene.clock)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(Event=device.event)))
    session: Any = SimpleNamespace(tracker=scene.tracker, recorder=scene.rank.recorder, on_leave=[])
    parameter = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    optimizer = SimpleNamespace(param_groups=[{"params": [parameter]}])
    look_at_device(session, optimizer)
    way = scene.tracker.begins(Loader())
    for _ in range(4 * EVERY):
        scene.fetch(way, 1.0)
        scene.step(1.0)
    for call in session.on_leave:
        call()
    scene.ends()
    ledger = scene.ledger()
    assert trained(ledger)[1] > 0
    assert any("(cuda): what it felt of waits for data is known from 4 of them" in note for note in ledger.notes)


def test_on_a_device_without_events_only_totals_are_known(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(odd=SimpleNamespace()))
    session: Any = SimpleNamespace(tracker=scene.tracker, recorder=scene.rank.recorder, on_leave=[])
    parameter = SimpleNamespace(device=SimpleNamespace(type="odd"))
    look_at_device(session, SimpleNamespace(param_groups=[{"params": [parameter]}]))
    scene.epoch(Loader(), 10, wait=1.0, work=1.0)
    scene.ends()
    ledger = scene.ledger()
    assert trained(ledger) == (pytest.approx(19.0, abs=1.0), 0, 10)
    assert any("(odd): only totals are known" in note for note in ledger.notes)

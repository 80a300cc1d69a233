"""A worker times its own steps before the first request, and tells what it found at once."""

from collections.abc import Callable, Collection
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import pytest

from diptych.engine.backends.base import Backend
from diptych.engine.kv.cache import KVCache
from diptych.engine.launched_step import LaunchedStep
from diptych.engine.runner import Runner
from diptych.engine.scheduling.step import StepOutput, StepPlan
from diptych.engine.scheduling.step_learner import StepLearner, work_of
from diptych.engine.trial_runner import IN_A_ROW, TrialRunner
from diptych.step_model import NUM_KNOWN_STEPS, StepCost, StepModel, StepWork
from diptych.worker.config import WorkerConfig
from tests.engines import CPU, AheadBackend, load_decoder
from tests.integration.worker_rig import decode_worker
from tests.tiny_model import write_tiny_model

MAX_BATCHED_TOKENS, MAX_NUM_SEQS = 70, 9
LAW = StepModel(StepCost(0.006, 0.001, 5e-7), StepCost(0.009, 0.0008, 3e-6, 0.0009, 3e-7))
SETTINGS = {"num_blocks": 40, "block_size": 4, "max_num_seqs": 8, "max_batched_tokens": 24}


class Watched(Runner):
    """Remembers what was asked for."""

    def __init__(self, folder: Path, backend: Backend, num_blocks: int) -> None:
        decoder = load_decoder(folder, backend=backend)
        super().__init__(decoder, KVCache(decoder.config, num_blocks, 8), backend)
        self.works: list[StepWork] = []

    def launch(self, plan: StepPlan) -> LaunchedStep:
        self.works.append(work_of(plan))
        return super().launch(plan)

    def trials(self) -> TrialRunner:
        return TrialRunner(self, max_batched_tokens=MAX_BATCHED_TOKENS, max_num_seqs=MAX_NUM_SEQS)


def ticking(step_s: float) -> Callable[[], float]:
    ticks = count()
    return lambda: next(ticks) * step_s


@pytest.mark.parametrize("num_blocks", [1, 5, 200])
@pytest.mark.parametrize("backend", [CPU, AheadBackend()], ids=["cpu", "ahead"])
def test_each_trial_is_what_it_says_and_leaves_no_trace(
    backend: Backend, num_blocks: int, tmp_path: Path
) -> None:
    runner = Watched(write_tiny_model(tmp_path, "llama"), backend, num_blocks)
    ratios: list[float] = []
    measured = runner.trials().run(ratios.append)
    num_each = IN_A_ROW if backend.steps_in_flight > 1 else 1
    assert [step.work for step in measured for _ in range(num_each)] == runner.works
    assert all(step.duration_s > 0.0 for step in measured)
    for with_prompt in (False, True):
        works = [
            step.work for step in measured if bool(step.work.num_prefill_tokens) is with_prompt
        ]
        assert len(works) >= NUM_KNOWN_STEPS
    assert ratios == sorted(ratios)
    assert ratios[-1] == 1.0
    assert not runner.kv_cache.tensor.any()


def test_a_slow_model_is_not_tried_for_long(tmp_path: Path) -> None:
    runner = Watched(write_tiny_model(tmp_path, "llama"), CPU, 200)
    ratios: list[float] = []
    measured = runner.trials().run(ratios.append, ticking(0.9))
    assert [bool(step.work.num_prefill_tokens) for step in measured] == [True, False]
    assert ratios == sorted(ratios)
    assert ratios[-1] == 1.0


class Timed(Watched):
    """Its steps take so many times what a law says, on a clock of its own, and some 0.8 s more."""

    now_s, times = 0.0, 6
    hiccups: Collection[int] = ()

    def launch(self, plan: StepPlan) -> LaunchedStep:
        work = work_of(plan)
        duration_s = self.times * LAW.cost_of(work).expected_s(work)
        duration_s += 0.8 * (len(self.works) in self.hiccups)
        self.now_s += duration_s
        self.works.append(work)
        output = StepOutput(tokens=(), duration_s=duration_s)
        return LaunchedStep(Mock(), lambda step: output)

    def learned(self) -> StepModel:
        trials = TrialRunner(self, max_batched_tokens=512, max_num_seqs=64)
        return StepLearner(trials.run(clock=lambda: self.now_s)).model


def test_on_a_slow_machine_long_trials_are_left_out_and_both_kinds_are_known(
    tmp_path: Path,
) -> None:
    """A prompt of 512 tokens takes 2.8 s, and 64 rows 0.4."""
    runner = Timed(write_tiny_model(tmp_path, "llama"), CPU, 200)
    model = runner.learned()
    assert model.decode.is_known
    assert model.prefill.is_known
    assert runner.now_s < 2 * 6.5
    assert max(work.num_prefill_tokens for work in runner.works) < 512
    for kind in (lambda work: work.num_prefill_tokens, lambda work: not work.num_prefill_tokens):
        works = [work for work in runner.works if kind(work)]
        first, second = works[: len(set(works))], works[len(set(works)) :]
        assert second == first[::-1][: len(second)]


@pytest.mark.parametrize("hiccup", [0, 1, 3, 11, 28, 29, 40])
def test_one_that_something_came_between_leaves_out_no_other(hiccup: int, tmp_path: Path) -> None:
    runner = Timed(write_tiny_model(tmp_path, "llama"), CPU, 200)
    runner.times, runner.hiccups = 1, (hiccup,)
    model = runner.learned()
    assert max(work.num_prefill_tokens for work in runner.works) == 512
    assert max(work.num_decode_rows for work in runner.works) == 64
    for work in (StepWork.of_prompt(512, 0), StepWork.of_prompt(20, 0), StepWork(1, 99)):
        expected_s = LAW.cost_of(work).expected_s(work)
        assert model.cost_of(work).expected_s(work) == pytest.approx(expected_s, rel=0.05)


class Lawful(Watched):
    """Its steps take what a law says, and twice that from one of them to another one."""

    slow = range(0)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        work = work_of(plan)
        duration_s = LAW.cost_of(work).expected_s(work) * (1 + (len(self.works) in self.slow))
        self.works.append(work)
        output = StepOutput(tokens=(), duration_s=duration_s)
        return LaunchedStep(Mock(), lambda step: output)


@pytest.mark.parametrize("begin", [0, 24, 40, 70])
def test_a_neighbour_amid_the_trials_is_not_what_many_rows_cost(begin: int, tmp_path: Path) -> None:
    """In one pass the trials are in the order of their rows: those at its end looked dear."""
    runner = Lawful(write_tiny_model(tmp_path, "llama"), CPU, 200)
    runner.slow = range(begin, begin + 12)
    trials = TrialRunner(runner, max_batched_tokens=512, max_num_seqs=64)
    model = StepLearner(trials.run()).model
    for num_rows in (1, 2, 8, 16, 32):
        work = StepWork(num_rows, 100 * num_rows)
        expected_s = LAW.decode.expected_s(work)
        assert model.decode.expected_s(work) == pytest.approx(expected_s, rel=0.05)
    for num_tokens in (16, 100, 512):
        work = StepWork.of_prompt(num_tokens, 0)
        expected_s = LAW.prefill.expected_s(work)
        assert model.prefill.expected_s(work) == pytest.approx(expected_s, rel=0.05)
    assert max(model.decode.upper_ratio, model.prefill.upper_ratio) < 1.1


async def test_a_worker_that_had_no_request_tells_what_its_steps_take(
    tiny_llama: Path, tmp_path: Path
) -> None:
    most_s: float = WorkerConfig.model_fields["step_trials_s"].default
    async with decode_worker(tiny_llama, tmp_path, SETTINGS, step_trials_s=most_s) as worker:
        model = StepModel.from_proto((await worker.state()).step_model)
    assert model.decode.is_known
    assert model.prefill.is_known


async def test_one_that_is_not_to_try_any_is_ready_without(
    tiny_llama: Path, tmp_path: Path
) -> None:
    async with decode_worker(tiny_llama, tmp_path, SETTINGS, step_trials_s=0.0) as worker:
        model = StepModel.from_proto((await worker.state()).step_model)
    assert not model.decode.num_steps
    assert not model.prefill.num_steps


@pytest.mark.parametrize("most_s", [1.0, 10.0])
def test_they_take_as_long_as_they_may(tmp_path: Path, most_s: float) -> None:
    """Steps that get slower and slower."""
    runner = Timed(write_tiny_model(tmp_path, "llama"), CPU, 200)
    runner.times = 100
    TrialRunner(runner, max_batched_tokens=512, max_num_seqs=64, most_s=most_s).run(
        clock=lambda: runner.now_s
    )
    longest_s = max(runner.times * LAW.cost_of(work).expected_s(work) for work in runner.works)
    assert 2 * most_s < runner.now_s < 4 * most_s + 2 * longest_s

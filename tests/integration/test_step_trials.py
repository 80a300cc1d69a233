"""A worker times its own steps before the first request, and tells what it found at once."""

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from diptych.engine.backends.base import Backend
from diptych.engine.kv.cache import KVCache
from diptych.engine.launched_step import LaunchedStep
from diptych.engine.runner import Runner
from diptych.engine.scheduling.step import StepPlan
from diptych.engine.scheduling.step_learner import work_of
from diptych.engine.step_trials import IN_A_ROW, StepTrials
from diptych.step_model import NUM_KNOWN_STEPS, StepModel, StepWork
from tests.engines import CPU, AheadBackend, load_decoder
from tests.integration.worker_rig import decode_worker
from tests.tiny_model import write_tiny_model

MAX_BATCHED_TOKENS, MAX_NUM_SEQS = 70, 9
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

    def trials(self) -> StepTrials:
        return StepTrials(self, max_batched_tokens=MAX_BATCHED_TOKENS, max_num_seqs=MAX_NUM_SEQS)


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
    measured = runner.trials().run(ratios.append, ticking(0.6))
    assert [bool(step.work.num_prefill_tokens) for step in measured] == 3 * [True] + 3 * [False]
    assert ratios == sorted(ratios)
    assert ratios[-1] == 1.0


async def test_a_worker_that_had_no_request_tells_what_its_steps_take(
    tiny_llama: Path, tmp_path: Path
) -> None:
    async with decode_worker(tiny_llama, tmp_path, SETTINGS) as worker:
        model = StepModel.from_proto((await worker.state()).step_model)
    assert model.decode.is_known
    assert model.prefill.is_known

"""What the runner gives back, a result or an error, comes when the device has done the step."""

import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diptych.engine.backends.base import DeviceMemory, ForwardPass, Mark, MemoryUsage
from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.inputs import StepInputs
from diptych.engine.kv.cache import KVCache
from diptych.engine.model.decoder import Decoder
from diptych.engine.model.parts import Rows
from diptych.engine.runner import Runner
from diptych.engine.scheduling.step import Chunk, SampledToken, SampleSpec, StepPlan
from diptych.errors import DeviceMemoryError, LogitsError
from diptych.sampling_params import SamplingParams
from tests.engines import load_decoder
from tests.tiny_model import write_tiny_model

SPEC = SampleSpec(params=SamplingParams(temperature=0.0, max_tokens=1), allow_stop=True)


class BrokenError(Exception):
    """What the device's library raises."""


class LateBackend(TorchBackend):
    """A device that is behind with whatever it is given until somebody waits for it."""

    def __init__(self, broken: str = "") -> None:
        """``broken``: the part of a step that fails, after all before it was begun."""
        super().__init__(torch.device("cpu"))
        self.is_behind = False
        self._broken = broken

    def begin(self, part: str) -> None:
        self.is_behind = True
        if part == self._broken:
            raise BrokenError(part)

    def synchronise(self) -> None:
        self.is_behind = False

    def forward_pass(self, model: Decoder, kv_cache: KVCache) -> ForwardPass:
        made = super().forward_pass(model, kv_cache)

        def forward(inputs: StepInputs, rows: Rows) -> Tensor:
            self.begin("forward")
            return made(inputs, rows)

        return forward

    def sample(
        self, logits: Tensor, specs: Sequence[SampleSpec], positions: Sequence[int]
    ) -> list[SampledToken | LogitsError]:
        self.begin("sample")  # on a stream of its own, say
        return super().sample(logits, specs, positions)


def runner_on(backend: TorchBackend, folder: Path) -> Runner:
    write_tiny_model(folder)
    decoder = load_decoder(folder)
    return Runner(decoder, KVCache(decoder.config, 8, 16), backend)


def plan_of(samples: Sequence[SampleSpec | None]) -> StepPlan:
    return StepPlan(
        chunks=tuple(
            Chunk(token_ids=(3, 4, 5), start=0, block_table=(index,), sample=sample)
            for index, sample in enumerate(samples)
        )
    )


@pytest.mark.parametrize("samples", [(None,), (SPEC,), (None, SPEC), (None, None)])
def test_a_step_ends_when_the_device_has_done_it(
    tmp_path: Path, samples: tuple[SampleSpec | None, ...]
) -> None:
    backend = LateBackend()
    output = runner_on(backend, tmp_path).execute(plan_of(samples))
    assert not backend.is_behind
    assert [token is None for token in output.tokens] == [sample is None for sample in samples]


@pytest.mark.parametrize("part", ["forward", "sample"])
def test_a_step_that_fails_ends_when_the_device_has_done_what_it_began(
    tmp_path: Path, part: str
) -> None:
    backend = LateBackend(broken=part)
    runner = runner_on(backend, tmp_path)
    with pytest.raises(BrokenError):
        runner.execute(plan_of((SPEC,)))
    assert not backend.is_behind


class LateAheadBackend(LateBackend):
    """The same, given steps while others are in flight."""

    steps_in_flight = 2

    def mark(self) -> Mark:
        self.begin("mark")
        return super().mark()


@pytest.mark.parametrize("part", ["forward", "mark"])
def test_a_launch_that_fails_ends_when_the_device_has_done_what_it_began(
    tmp_path: Path, part: str
) -> None:
    """A device that is lost may say so with any call: waiting for it tells."""
    backend = LateAheadBackend(broken=part)
    runner = runner_on(backend, tmp_path)
    with pytest.raises(BrokenError):
        runner.launch(plan_of((SPEC,)))
    assert not backend.is_behind


class FullBackend(TorchBackend):
    """A device without room for steps of many rows; it keeps what was freed."""

    def __init__(self, max_rows: int, error: type[Exception]) -> None:
        super().__init__(torch.device("cpu"))
        self.memory: DeviceMemory | None = self
        self._max_rows, self._error = max_rows, error
        self.made: list[weakref.ref[Tensor]] = []
        self.num_held: list[int] = []  # tensors of the step, whenever unused ones are given back

    def release_unused(self) -> None:
        self.num_held.append(sum(made() is not None for made in self.made))

    def usage(self) -> MemoryUsage:
        raise NotImplementedError

    def forward_pass(self, model: Decoder, kv_cache: KVCache) -> ForwardPass:
        made = super().forward_pass(model, kv_cache)

        def forward(inputs: StepInputs, rows: Rows) -> Tensor:
            hidden = made(inputs, rows)
            self.made.append(weakref.ref(hidden))
            if len(inputs.token_ids) > self._max_rows:
                raise self._error("tried to allocate 20 GiB")
            return hidden

        return forward


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_a_step_without_memory_leaves_none_behind(tmp_path: Path, error: type[Exception]) -> None:
    """What it had is free when the device is asked to give back what nobody uses."""
    backend = FullBackend(3, error)
    runner = runner_on(backend, tmp_path)
    with pytest.raises(DeviceMemoryError, match="20 GiB"):
        runner.execute(plan_of((SPEC, SPEC)))
    assert backend.num_held == [0]
    assert runner.execute(plan_of((SPEC,))).tokens[0] is not None
    assert backend.num_held == [0]

"""A step that a device was asked for, and which of its tokens the host draws. Model thread."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from diptych.engine.backends.base import Mark
from diptych.engine.prompt_report import ReportRows
from diptych.engine.sampling.device_draws import DeviceDraws
from diptych.engine.scheduling.run_ahead import awaited
from diptych.engine.scheduling.step import SampleSpec, StepOutput, StepPlan


class Samples(NamedTuple):
    """Chunks after which a token is drawn, all in one place."""

    indexes: list[int]  # of the chunks
    specs: list[SampleSpec]
    positions: list[int]

    @classmethod
    def of(cls, plan: StepPlan, *, by_device: bool) -> "Samples":
        """Those that the device draws, or those that the host does."""
        samples = cls([], [], [])
        for index, chunk in enumerate(plan.chunks):
            spec = chunk.sample
            if spec is None:
                continue
            if (awaited(spec.params) is None) is by_device:
                samples.add(index, spec, chunk.end)
        return samples

    @classmethod
    def all_of(cls, plan: StepPlan) -> "Samples":
        samples = cls([], [], [])
        for index, chunk in enumerate(plan.chunks):
            if chunk.sample is not None:
                samples.add(index, chunk.sample, chunk.end)
        return samples

    def add(self, index: int, spec: SampleSpec, position: int) -> None:
        self.indexes.append(index)
        self.specs.append(spec)
        self.positions.append(position)


@dataclass(slots=True, eq=False)
class StepAtWork:
    """What the device was asked for, until somebody waits for it."""

    plan: StepPlan
    begin_s: float
    by_host: Samples
    logits: Tensor | None  # of ``by_host``, [R, vocab_size]; None: of nobody
    by_device: Samples
    draws: DeviceDraws | None  # of ``by_device``
    told_of: ReportRows
    told: Tensor | None  # hidden states of those rows
    mark: Mark | None  # behind all that; None: the device is waited for


class LaunchedStep:
    """A runner's step in flight. Implements the engine's ``LaunchedStep``."""

    def __init__(self, step: StepAtWork, finish: Callable[[StepAtWork], StepOutput]) -> None:
        self._step: StepAtWork | None = step
        self._finish = finish

    def wait(self) -> StepOutput:
        """Once. As ``Runner.execute``."""
        step, self._step = self._step, None
        assert step is not None, "it has been waited for"
        return self._finish(step)

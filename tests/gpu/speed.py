"""Steps of whole models of real shapes against what the device can do at best.

Weights are random and made on the device; contexts are made up. The least time of a step is that of
:mod:`tests.bench.roofline`, at the rates of this device's copies and products.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch

from diptych.engine.backends.base import Backend
from diptych.engine.kv.cache import KVCache
from diptych.engine.launched_step import LaunchedStep
from diptych.engine.model.config import ModelConfig
from diptych.engine.runner import Runner
from diptych.engine.scheduling.step import Chunk, SampleSpec, StepPlan
from diptych.formats import Quantization
from diptych.sampling_params import SamplingParams
from tests.bench import roofline
from tests.bench.roofline import Ceilings, Operation, Span, Storage
from tests.gpu.attention import (
    NUM_AFTER_EACH_OTHER,
    Stopwatch,
    between_events,
    copy_bytes_per_s,
)
from tests.gpu.models import MODELS, random_decoder

BLOCK_SIZE = 32
_CHUNK = 4096  # tokens of a prompt in one step
_GREEDY = SampleSpec(params=SamplingParams(temperature=0.0, max_tokens=2**20), allow_stop=False)
_BUSY_CYCLES = 1 << 26  # of the device: tens of milliseconds
_WEIGHT_BYTES: Mapping[Quantization, Storage] = MappingProxyType(
    {"none": Storage(2), "fp8": Storage(1, 4)}
)


class Case(NamedTuple):
    """Steps of single tokens, or a prompt."""

    kind: Literal["decode", "prefill"]
    num_rows: int  # of single tokens; 1 prompt
    num_tokens: int  # of each context, or of the prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A shape with all of its layers, and what is asked of it."""

    name: str
    num_layers: int
    wanted: Mapping[Case, float]  # the least share of what the device can do
    fp8: bool = False  # whether one sequence is to be 1.5 times as fast with such weights

    def config(self) -> ModelConfig:
        return ModelConfig.from_hf({**MODELS[self.name], "num_hidden_layers": self.num_layers})


_ALONE = Case("decode", 1, 1024)
_BATCHES: Mapping[Case, float] = {Case("decode", n, 1024): 0.75 for n in (64, 128, 256)}
_PROMPT: Mapping[Case, float] = {Case("prefill", 1, 8192): 0.55}
MODELS_TIMED = (
    Model(name="Qwen3-0.6B", num_layers=28, wanted={_ALONE: 0.55, **_BATCHES, **_PROMPT}),
    Model(
        name="Llama-3.1-8B", num_layers=32, wanted={_ALONE: 0.75, **_BATCHES, **_PROMPT}, fp8=True
    ),
)
_MIN_FP8_SPEEDUP = 1.5
_MAX_OVERHEAD, _OVERHEAD_ROWS = 0.05, 64


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one case."""

    case: str
    step_s: float  # from one step's end to the next one's; of a prompt, all of them
    device_s: float  # what the device takes of it
    figure: str  # what the value is
    value: float
    wanted: float
    holds: bool


def ceilings(device: torch.device, dtype: torch.dtype, size: int, stopwatch: Stopwatch) -> Ceilings:
    """Of copies of 1 GiB for the largest size, and of square products of so many rows."""
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    num = NUM_AFTER_EACH_OTHER
    flops_per_s = num * 2 * size**3 / stopwatch(lambda: [a @ b for _ in range(num)])
    return Ceilings(copy_bytes_per_s(device, 16 * size**2, stopwatch), flops_per_s, flops_per_s)


def check(
    model: Model, backend: Backend, dtype: torch.dtype, limit: Ceilings, busy_watch: Stopwatch
) -> Iterator[Measured]:
    """One after the other. busy_watch: of the device alone, where it is asked ahead of time."""
    alone_s = 0.0
    rig = Rig(model, backend, dtype, "none")
    for case, wanted in model.wanted.items():
        step_s, device_s = rig.seconds(case, busy_watch)
        figure, least = _figure(case)
        value = least(rig.operations(case), limit) / step_s
        told = f"{model.name}, {case}"
        yield Measured(told, step_s, device_s, figure, value, wanted, value >= wanted)
        if (case.kind, case.num_rows) == ("decode", _OVERHEAD_ROWS):
            value = 1 - device_s / step_s
            holds = value <= _MAX_OVERHEAD
            figure = "share of a step outside the device, at most"
            yield Measured(told, step_s, device_s, figure, value, _MAX_OVERHEAD, holds)
        if (case.kind, case.num_rows) == ("decode", 1):
            alone_s = step_s
    if model.fp8:
        del rig  # both would not fit everywhere
        step_s, device_s = Rig(model, backend, dtype, "fp8").seconds(_ALONE, busy_watch)
        value = alone_s / step_s
        holds = value >= _MIN_FP8_SPEEDUP
        told = f"{model.name}, {_ALONE}, fp8"
        yield Measured(told, step_s, device_s, "speed-up", value, _MIN_FP8_SPEEDUP, holds)


def _figure(case: Case) -> tuple[str, Callable[[Sequence[Operation], Ceilings], float]]:
    if case.kind == "prefill":
        return "MFU", roofline.least_arithmetic_s
    if case.num_rows == 1:
        return "MBU", roofline.least_memory_s
    return "share of the roofline", roofline.least_s


class Rig:
    """A model on a pool that holds any of its cases; of its KV all is zero."""

    def __init__(
        self, model: Model, backend: Backend, dtype: torch.dtype, quantization: Quantization
    ) -> None:
        cases = list(model.wanted)
        num_blocks = max(c.num_rows * -(-c.num_tokens // BLOCK_SIZE) for c in cases) + 1
        decoder = random_decoder(model.config(), backend, dtype, quantization)
        self._cache = KVCache(decoder.config, num_blocks, BLOCK_SIZE, dtype, backend.kv_memory)
        self._cache.clear(num_blocks)
        self._runner = Runner(decoder, self._cache, backend)
        self._storage = _WEIGHT_BYTES[quantization]
        self._runner.warm_up(max_rows=max(c.num_rows for c in cases if c.kind == "decode"))

    def operations(self, case: Case) -> list[Operation]:
        cache, config = self._cache, self._runner.model.config
        kv_bytes = cache.block_bytes // cache.block_size // config.num_layers
        return [
            operation
            for plan in self.plans(case)
            for operation in roofline.operations(
                config,
                self._storage._replace(kv_bytes=kv_bytes),
                [Span(c.start, len(c.token_ids), c.sample is not None) for c in plan.chunks],
            )
        ]

    def seconds(
        self, case: Case, busy_watch: Stopwatch, num_steps: int = 30
    ) -> tuple[float, float]:
        """Of a step, or all of a prompt's, as it comes after others; and the device's share."""
        plans = self.plans(case)
        device_s = busy_watch(lambda: [self._runner.launch(plan) for plan in plans])
        self._runner.execute(plans[0])  # so nothing of it is in flight
        ends = self.ends(plans * (num_steps if case.kind == "decode" else 3))
        every = len(plans)
        gaps = [b - a for a, b in zip(ends, ends[every:], strict=False)]
        return statistics.median(gaps), device_s

    def ends(self, plans: Iterable[StepPlan]) -> list[float]:
        """When each was over, as many in flight as there may be; s, by the performance counter."""
        steps: deque[LaunchedStep] = deque()
        ends: list[float] = []
        for plan in plans:
            steps.append(self._runner.launch(plan))
            if len(steps) == self._runner.steps_in_flight:
                steps.popleft().wait()
                ends.append(time.perf_counter())
        while steps:
            steps.popleft().wait()
            ends.append(time.perf_counter())
        return ends

    def plans(self, case: Case) -> list[StepPlan]:
        blocks_each = -(-case.num_tokens // BLOCK_SIZE)
        order = torch.randperm(case.num_rows * blocks_each, generator=torch.Generator())
        tables = order.view(case.num_rows, blocks_each).tolist()
        if case.kind == "decode":
            chunks = [_chunk(case.num_tokens - 1, 1, table, _GREEDY) for table in tables]
            return [StepPlan(chunks=tuple(chunks))]
        plans = []
        for start in range(0, case.num_tokens, _CHUNK):
            count = min(_CHUNK, case.num_tokens - start)
            sample = _GREEDY if start + count == case.num_tokens else None
            plans.append(StepPlan(chunks=(_chunk(start, count, tables[0], sample),)))
        return plans


def _chunk(start: int, count: int, table: Sequence[int], sample: SampleSpec | None) -> Chunk:
    tokens = tuple(5 + position % 99 for position in range(start, start + count))
    return Chunk(token_ids=tokens, start=start, block_table=tuple(table), sample=sample)


def busy_seconds(do: Callable[[], object]) -> float:
    """The median of ten of what the device takes for it, asked for while it is at something else.

    So the host is ahead, and no time that it takes is among it.
    """
    taken: list[float] = []
    for _ in range(10):
        torch.cuda._sleep(_BUSY_CYCLES)  # type: ignore[no-untyped-call]
        taken.append(between_events(do))
    return statistics.median(taken)

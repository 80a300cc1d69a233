"""A worker's engine without its gRPC: loaded, stepped and run as the worker does."""

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch

from decode_worker.config import DecodeWorkerConfig
from decode_worker.outbox import NewToken, Outbox
from diptych.engine.model.compact import CompactWeight
from diptych.engine.scheduling import sequence
from diptych.engine.scheduling.sequence import SequenceKey
from diptych.engine.scheduling.step import Chunk, SampleSpec, SequenceUpdate, StepPlan
from diptych.models.compact import row_bytes
from diptych.progress import silent
from diptych.sampling_params import SamplingParams
from diptych.worker.engine_parts import EngineParts
from diptych.worker.loading import LoadedModel, load_model
from prefill_worker.config import PrefillWorkerConfig
from tests.bench.roofline import Operation, Span, Storage, operations
from tests.bench.stopwatches import Parts, forward_timed, parts_timed

T = TypeVar("T")

# Of an element, and of an output feature besides (its scale).
_WEIGHT_BYTES = {"float32": (4, 0), "bfloat16": (2, 0), "int8": (1, 4)}
_COMPACT_BYTES = row_bytes(32, 32) / 32  # few types of ggml have smaller blocks
_GREEDY = SampleSpec(params=SamplingParams(temperature=0.0, max_tokens=2**20), allow_stop=False)


class Overhead(NamedTuple):
    """Shares of the time between two steps of a running engine, medians over the steps."""

    step_s: float  # from one step's end to the next one's
    outside_forward: float  # scheduler, booking, messages, thread hops, inputs and sampling
    inputs_and_sampling: float  # of these, on the model thread


class Rig:
    """One loaded model and its model thread. Contexts are made up: their KV is zero."""

    def __init__(
        self, config: DecodeWorkerConfig, model: LoadedModel, thread: ThreadPoolExecutor
    ) -> None:
        self.config, self.model = config, model
        self._thread = thread
        self._block_ids = list(range(model.kv_cache.num_blocks))
        random.Random(7).shuffle(self._block_ids)  # as scattered as after hours of use

    def call(self, work: Callable[[], T]) -> T:
        """Run on the model thread."""
        return self._thread.submit(work).result()

    def set_num_threads(self, num_threads: int) -> None:
        self.call(lambda: torch.set_num_threads(num_threads))

    @property
    def is_compact(self) -> bool:
        """Whether float32 weights are kept compact."""
        return isinstance(self.model.runner.model.weights.embedding, CompactWeight)

    def decode_plan(self, batch: int, context_len: int) -> StepPlan:
        """One token for each of ``batch`` sequences that have ``context_len``, it included."""
        num_blocks = -(-context_len // self.config.block_size)
        tables = iter(self._block_ids)
        chunks = [
            Chunk(
                token_ids=(5 + row,),
                start=context_len - 1,
                block_table=tuple(next(tables) for _ in range(num_blocks)),
                sample=_GREEDY,
            )
            for row in range(batch)
        ]
        return StepPlan(chunks=tuple(chunks))

    def prefill_plans(self, num_tokens: int) -> list[StepPlan]:
        """One prompt in the chunks that a prefill worker makes of it, unless told otherwise."""
        step = PrefillWorkerConfig.model_fields["max_batched_tokens"].default
        if "max_batched_tokens" in self.config.model_fields_set:
            step = self.config.max_batched_tokens
        table = tuple(self._block_ids[: -(-num_tokens // self.config.block_size)])
        chunks = []
        for start in range(0, num_tokens, step):
            end = min(num_tokens, start + step)
            tokens = tuple(5 + position % 499 for position in range(start, end))
            sample = _GREEDY if end == num_tokens else None
            chunks.append(Chunk(token_ids=tokens, start=start, block_table=table, sample=sample))
        return [StepPlan(chunks=(chunk,)) for chunk in chunks]

    def operations(self, plans: Sequence[StepPlan]) -> list[Operation]:
        """What these steps cost."""
        cache = self.model.kv_cache
        kv_bytes = cache.block_bytes // cache.block_size // self.model.config.num_layers
        weight_bytes, bytes_per_row = _WEIGHT_BYTES[weight_type(self.config)]
        storage = Storage(
            _COMPACT_BYTES if self.is_compact else weight_bytes, bytes_per_row, kv_bytes
        )
        return [
            op
            for plan in plans
            for op in operations(
                self.model.config,
                storage,
                [Span(c.start, len(c.token_ids), c.sample is not None) for c in plan.chunks],
            )
        ]

    def run(self, plans: Sequence[StepPlan]) -> float:
        """Seconds on the model thread for these steps, from inputs to tokens."""

        def steps() -> float:
            begin = time.perf_counter()
            for plan in plans:
                self.model.runner.execute(plan)
            return time.perf_counter() - begin

        return self.call(steps)

    def parts(self, plans: Sequence[StepPlan], num_runs: int) -> Parts:
        """Where the forward passes of steps spend their time, summed over ``num_runs``."""
        with parts_timed(self.model.runner.model) as parts:
            for _ in range(num_runs):
                self.run(plans)
        return parts

    def overhead(self, batch: int, context_len: int, num_steps: int) -> Overhead:
        """Run the engine itself, with its scheduler, and send what it says into an outbox."""
        return asyncio.run(self._overhead(batch, context_len, num_steps))

    async def _overhead(self, batch: int, context_len: int, num_steps: int) -> Overhead:
        outbox = Outbox(max_events=64)
        ends: list[float] = []
        runner_s: list[float] = []
        forward_s: list[float] = []
        done = asyncio.Event()

        def on_step(updates: list[SequenceUpdate]) -> None:
            assert parts.engine.last_step is not None
            outbox.put_tokens(
                NewToken(
                    update.sequence.key.sequence_id, update.position, update.token.token_id, None
                )
                for update in updates
                if update.token is not None and update.position is not None
            )
            while (event := outbox.take()) is not None:
                event.SerializeToString()
            ends.append(time.perf_counter())
            runner_s.append(parts.engine.last_step.duration_s)
            forward_s.append(watch.total_s)
            if len(ends) > num_steps:
                done.set()

        parts = EngineParts.build(self.config, self.model, self._thread)
        engine = parts.engine
        engine.subscribe(on_step)
        with forward_timed() as watch:
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(engine.run(), name="engine")
                sequences = [self._sequence(number, context_len) for number in range(batch)]
                for seq in sequences:
                    engine.reserve(seq)
                    engine.mark_proven(seq)
                    engine.start(seq, [7], compute_missing=False)
                await done.wait()
                running.cancel()
        for seq in sequences:
            engine.release(seq)
        steps = [after - before for before, after in pairwise(ends)]
        forwards = [after - before for before, after in pairwise(forward_s)]
        shares = [1 - forward / step for forward, step in zip(forwards, steps, strict=True)]
        on_thread = [
            (runner - forward) / step
            for runner, forward, step in zip(runner_s[1:], forwards, steps, strict=True)
        ]
        median = statistics.median
        return Overhead(median(steps), median(shares), median(on_thread))

    def _sequence(self, number: int, num_tokens: int) -> sequence.Sequence:
        first = 5 + number
        return sequence.Sequence(
            key=SequenceKey("bench", number),
            token_ids=[first + index % 400 for index in range(num_tokens - 1)],
            num_prompt_tokens=num_tokens - 1,
            sampling=_GREEDY.params,
        )


def weight_type(config: DecodeWorkerConfig) -> str:
    """Element type of the linears' weights: float32, bfloat16 or int8."""
    if config.model_dump().get("quantization") == "int8":
        return "int8"
    return "float32" if config.dtype == "auto" else config.dtype  # as on any CPU


@contextmanager
def model_thread() -> Iterator[ThreadPoolExecutor]:
    """The one thread that may use torch.

    OpenMP keeps a team of threads for each thread that ever ran a parallel operator, and once
    there are more of them than cores, none spins for work: every operator then waits for
    the system to wake its team, and a decode step takes a third longer.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="model") as thread:
        yield thread


@contextmanager
def loaded(config: DecodeWorkerConfig, thread: ThreadPoolExecutor) -> Iterator[Rig]:
    """Load a model as a worker does, warmed up."""
    model = thread.submit(load_model, config, "off", 0, silent).result()
    yield Rig(config, model, thread)

"""Executes step plans: inputs, forward pass, sampling.

Lives on the model thread alone; between steps it remembers nothing but weights, KV memory and,
where the next step may go on from them, the tokens that the device drew last. It trusts the
plan: which blocks belong to whom is the scheduler's business.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from diptych.engine.backends.base import Backend
from diptych.engine.device_copies import Send
from diptych.engine.inputs import StepInputs, build_inputs
from diptych.engine.kv.cache import KVCache
from diptych.engine.launched_step import LaunchedStep, Samples, StepAtWork
from diptych.engine.model.decoder import Decoder
from diptych.engine.model.parts import Rows
from diptych.engine.prompt_report import ReportRows
from diptych.engine.sampling.grammar_states import GrammarStates
from diptych.engine.sampling.logit_edits import Unseen
from diptych.engine.scheduling.report import Told
from diptych.engine.scheduling.step import Chunk, SampledToken, SampleSpec, StepOutput, StepPlan
from diptych.errors import DeviceMemoryError, DiptychError, LogitsError
from diptych.sampling_params import SamplingParams
from diptych.text.grammars import NO_TOKENIZER, Compiled, Grammars, NoGrammars

WarmUpProgress = Callable[[float], None]  # done ratio, 0 to 1
_FEW_ROWS = 16  # for which every device has memory
_T = TypeVar("_T")


class _Ran(NamedTuple):
    """What one step has made, see StepOutput."""

    tokens: list[SampledToken | DiptychError | None]
    reports: dict[int, Told]


class Runner:
    """Runs steps of one model on one KV cache."""

    def __init__(
        self,
        model: Decoder,
        kv_cache: KVCache,
        backend: Backend,
        grammars: Grammars | NoGrammars = NO_TOKENIZER,
    ) -> None:
        """Take the model and the memory, both of that backend; they stay the caller's to free."""
        self._model = model
        self._kv_cache = kv_cache
        self._backend = backend
        self._forward = backend.forward_pass(model, kv_cache)
        self._grammars = grammars
        self._grammar_states = GrammarStates(grammars)
        self._last: tuple[dict[int, int], Tensor] | None = None  # the device's draws, by chunk
        self._waited_s = 0.0  # when the last step was over

    @property
    def model(self) -> Decoder:
        """What it runs; for checks."""
        return self._model

    @property
    def kv_cache(self) -> KVCache:
        """The memory that its steps write."""
        return self._kv_cache

    @property
    def steps_in_flight(self) -> int:
        """Steps that may be launched before the first of them is waited for."""
        return self._backend.steps_in_flight

    def prepare(self, params: SamplingParams) -> Future[Compiled] | None:
        """Begin to compile what these parameters need, elsewhere. From any thread.

        None: they need nothing. It stays compiled as long as what is returned is kept.
        """
        if params.constraint is None or isinstance(self._grammars, NoGrammars):
            return None
        return self._grammars.compile(params.constraint.text)

    def warm_up(
        self, progress: WarmUpProgress = lambda ratio: None, max_rows: int = _FEW_ROWS
    ) -> None:
        """Compile and touch everything before the first real step.

        max_rows: single tokens that a step can have; no more are tried, unless they are few.
        Uses the cache's first blocks and leaves them zero. Call before any sequence owns a block.
        """
        size = self._kv_cache.block_size
        num_blocks = min(2, self._kv_cache.num_blocks)
        table = tuple(range(num_blocks))
        num_tokens = min(num_blocks * size - 1, self._model.config.max_position - 1)
        spec = SampleSpec(params=SamplingParams(top_k=50, top_p=0.5, max_tokens=1), allow_stop=True)
        prefill = [
            _chunk(0, range(1, 1 + num_tokens // 2), table),
            _chunk(num_tokens // 2, range(num_tokens - num_tokens // 2), table, spec),
        ]
        steps = [[chunk] for chunk in prefill if chunk.token_ids]
        drawn = [spec]
        if self.steps_in_flight > 1:  # the device draws some of them
            drawn.append(SampleSpec(params=SamplingParams(max_tokens=1), allow_stop=True))
        if num_tokens > 1:
            steps += [_mixed(rows, num_tokens, table, spec) for rows in self._backend.mixed_sizes]
        sizes = self._backend.decode_sizes
        steps += [
            [_chunk(num_tokens, (1,), table, drawn[row % len(drawn)]) for row in range(rows)]
            for rows in sorted({min(rows, max(max_rows, _FEW_ROWS)) for rows in sizes})
        ]
        for index, chunks in enumerate(steps):
            self.execute(StepPlan(chunks=tuple(chunks)))
            progress((index + 1) / len(steps))
        self.clear(num_blocks)

    def clear(self, num_blocks: int) -> None:
        """The first blocks are zero afterwards."""
        self._kv_cache.clear(num_blocks)

    def execute(self, plan: StepPlan) -> StepOutput:
        """Write the KV of the plan's tokens and draw the tokens it asks for.

        Returns or raises once the device has done all that it was given. Raises:
            ValueError: the plan is malformed (a bug of the caller's).
            DeviceMemoryError: the step needs more memory than there is; other steps may not.
            DeviceLostError: the device cannot be used again.
        """
        return self.launch(plan).wait()

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Ask the device for the step. Waited for in the order of launching; raises as ``execute``.

        A chunk may follow one of the plan that was launched before this one.
        """
        begin_s = time.perf_counter()
        return LaunchedStep(self._fitting(partial(self._begin, plan, begin_s)), self._end)

    def _end(self, step: StepAtWork) -> StepOutput:
        ran = self._fitting(partial(self._finish, step))
        begin_s = max(step.begin_s, self._waited_s)  # the device had another step before
        self._waited_s = time.perf_counter()
        return StepOutput(
            tokens=tuple(ran.tokens), duration_s=self._waited_s - begin_s, reports=ran.reports
        )

    def _fitting(self, part: Callable[[], _T]) -> _T:
        try:
            return part()
        except (torch.OutOfMemoryError, MemoryError) as error:
            lacked = str(error)
        # Not before the error is gone, whose traceback has the step's tensors.
        if self._backend.memory is not None:
            self._backend.memory.release_unused()
        raise DeviceMemoryError(lacked)

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> Tensor:
        """Write the KV and return the logits after every token, in plan order.

        For checks: no worker asks for them. Returns [plan.num_tokens, vocab_size] float32.
        """
        inputs = self._inputs(plan, self._backend.begin_step())
        lasts = zip(plan.chunks, inputs.last_rows, strict=True)
        rows = [np.arange(last + 1 - len(chunk.token_ids), last + 1) for chunk, last in lasts]
        return self._model.logits(self._forward(inputs, np.concatenate(rows)))

    def _inputs(self, plan: StepPlan, send: Send) -> StepInputs:
        return build_inputs(plan, self._kv_cache.block_size, send)

    def _hidden(self, inputs: StepInputs, last_rows: Rows, told_of: Rows) -> Tensor:
        """Of both, one after the other; a row may be in both: [R, hidden_size]."""
        if not len(told_of):
            return self._forward(inputs, last_rows)
        rows, places = np.unique(np.concatenate((last_rows, told_of)), return_inverse=True)
        hidden = self._forward(inputs, rows)  # no row twice: a step has memory for its own
        return hidden.index_select(0, torch.from_numpy(places).to(hidden.device))

    @torch.inference_mode()
    def _begin(self, plan: StepPlan, begin_s: float) -> StepAtWork:
        """Everything that needs nobody but the device."""
        try:
            send = self._backend.begin_step()
            inputs = self._inputs(plan, send)
            if self.steps_in_flight == 1:
                by_host = Samples.all_of(plan)
                return self._ask(plan, begin_s, inputs, Samples([], [], []), by_host, None)
            by_device = Samples.of(plan, by_device=True)
            unseen = self._follow(plan, inputs, by_device, send)
            by_host = Samples.of(plan, by_device=False)
            step = self._ask(plan, begin_s, inputs, by_device, by_host, unseen)
            step.mark = self._backend.mark()
        except BaseException:  # whatever broke off: what came before it may still write blocks
            self._last = None
            self._backend.synchronise()
            raise
        self._last = None
        if step.draws is not None:
            rows = {chunk: row for row, chunk in enumerate(by_device.indexes)}
            self._last = rows, step.draws.token_ids
        return step

    def _follow(
        self, plan: StepPlan, inputs: StepInputs, by_device: Samples, send: Send
    ) -> Unseen | None:
        """Put the tokens in that the device has drawn and the host does not know.

        Returns those of them on which the next ones of their rows of ``by_device`` depend.
        """
        places = [(index, chunk.follows) for index, chunk in enumerate(plan.chunks)]
        followers = [(index, place) for index, place in places if place is not None]
        if not followers:
            return None
        assert self._last is not None, "the step before this one drew nothing on the device"
        drawn_rows, token_ids = self._last
        drawn = np.array([drawn_rows[place] for _, place in followers], np.int64)
        rows = inputs.last_rows[[index for index, _ in followers]]
        tokens = token_ids.index_select(0, send(drawn))
        self._put_in(inputs, rows, tokens, send)
        orders = {index: order for order, (index, _) in enumerate(followers)}
        lacking = [
            row
            for row, (index, spec) in enumerate(
                zip(by_device.indexes, by_device.specs, strict=True)
            )
            if index in orders and spec.history is not None
        ]
        if not lacking:
            return None
        found = np.array([orders[by_device.indexes[row]] for row in lacking], np.int64)
        return Unseen(lacking, tokens.index_select(0, send(found)))

    def _put_in(self, inputs: StepInputs, rows: Rows, tokens: Tensor, send: Send) -> None:
        """Tokens that the device has drawn, where the host has put others. tokens: [R]."""
        inputs.token_ids.index_copy_(0, send(rows), tokens)

    def _ask(
        self,
        plan: StepPlan,
        begin_s: float,
        inputs: StepInputs,
        by_device: Samples,
        by_host: Samples,
        unseen: Unseen | None,
    ) -> StepAtWork:
        last_rows = inputs.last_rows[by_device.indexes + by_host.indexes]
        told_of = ReportRows.of(plan.chunks, inputs.last_rows)
        hidden = self._hidden(inputs, last_rows, told_of.rows)
        num_by_device, num_drawn = len(by_device.indexes), len(last_rows)
        logits = self._model.logits(hidden[:num_drawn]) if num_drawn else None
        draws = None
        if logits is not None and num_by_device:
            draws = self._backend.draw(
                logits[:num_by_device], by_device.specs, by_device.positions, unseen
            )
            # An empty view would keep them all until the step is waited for.
            logits = logits[num_by_device:] if by_host.indexes else None
        told = hidden[num_drawn:] if told_of.parts else None
        return StepAtWork(plan, begin_s, by_host, logits, by_device, draws, told_of, told, None)

    @torch.inference_mode()
    def _finish(self, step: StepAtWork) -> _Ran:
        """What the host has to see, or to do."""
        mark = step.mark
        try:
            # A device computes meanwhile: it was only told what to do.
            specs, refused = self._grammar_states.constrain(step.by_host.specs)
            if mark is None:
                return self._draw(step, specs, refused)
            mark.wait()
            with mark.beside():
                return self._draw(step, specs, refused)
        finally:  # whatever broke off: what came before it may still write blocks
            if mark is None:
                self._backend.synchronise()
            else:
                mark.wait()

    def _draw(
        self, step: StepAtWork, specs: Sequence[SampleSpec], refused: dict[int, DiptychError]
    ) -> _Ran:
        ran = _Ran([None] * len(step.plan.chunks), {})
        if step.draws is not None:
            for index, token in zip(step.by_device.indexes, step.draws.tell(), strict=True):
                ran.tokens[index] = token
        if step.by_host.indexes:
            assert step.logits is not None, "there are rows"
            drawn = self._backend.sample(step.logits, specs, step.by_host.positions)
            for row, (index, token) in enumerate(zip(step.by_host.indexes, drawn, strict=True)):
                ran.tokens[index] = refused.get(row, token)
        if step.told_of.parts:
            assert step.told is not None, "there are rows"
            for index, told in step.told_of.tell(step.told, self._model).items():
                if isinstance(told, LogitsError):
                    ran.tokens[index] = told
                else:
                    ran.reports[index] = told
        return ran


def _mixed(num_rows: int, num_tokens: int, table: tuple[int, ...], spec: SampleSpec) -> list[Chunk]:
    """A prompt's first token, and prompts of up to so many; all lie over one another."""
    lengths = [1] + [min(num_tokens, num_rows - at) for at in range(1, num_rows, num_tokens)]
    return [
        _chunk(0, (1,) * length, table, None if place else spec)
        for place, length in enumerate(lengths)
    ]


def _chunk(
    start: int, token_ids: Sequence[int], table: tuple[int, ...], spec: SampleSpec | None = None
) -> Chunk:
    return Chunk(token_ids=tuple(token_ids), start=start, block_table=table, sample=spec)

"""Executes step plans: inputs, forward pass, sampling.

Lives on the model thread alone; between steps it remembers nothing but weights
and KV memory. It trusts the plan: which blocks belong to whom is the scheduler's
business.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from diptych.engine.backends.base import Backend
from diptych.engine.inputs import StepInputs, build_inputs
from diptych.engine.kv.cache import KVCache
from diptych.engine.model.decoder import Decoder
from diptych.engine.model.parts import Rows
from diptych.engine.prompt_report import ReportRows
from diptych.engine.sampling.grammar_states import GrammarStates
from diptych.engine.scheduling.report import Told
from diptych.engine.scheduling.step import Chunk, SampledToken, SampleSpec, StepOutput, StepPlan
from diptych.engine.scheduling.step_timing import MeasuredStep
from diptych.errors import DeviceMemoryError, DiptychError, LogitsError
from diptych.sampling_params import SamplingParams
from diptych.text.grammars import Grammars

WarmUpProgress = Callable[[float], None]  # done ratio, 0 to 1


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
        grammars: Grammars | None = None,
    ) -> None:
        """Take the model and the memory, both of that backend; they stay the caller's to free.

        ``grammars`` is None where no output can be held to a constraint.
        """
        self._model = model
        self._kv_cache = kv_cache
        self._backend = backend
        self._forward = backend.forward_pass(model, kv_cache)
        self._grammars = grammars
        self._grammar_states = GrammarStates(grammars)

    @property
    def model(self) -> Decoder:
        """What it runs; for checks."""
        return self._model

    def prepare(self, params: SamplingParams) -> None:
        """Begin to compile what these parameters need, elsewhere. From any thread."""
        if params.constraint is not None and self._grammars is not None:
            self._grammars.compile(params.constraint.text)

    def warm_up(self, progress: WarmUpProgress = lambda ratio: None) -> MeasuredStep:
        """Compile and touch everything before the first real step; how long one takes then.

        Uses the cache's first blocks and leaves them zero. Call before any
        sequence owns a block.
        """
        size = self._kv_cache.block_size
        num_blocks = min(2, self._kv_cache.num_blocks)
        table = tuple(range(num_blocks))
        num_tokens = min(num_blocks * size - 1, self._model.config.max_position - 1)
        spec = SampleSpec(params=SamplingParams(top_p=0.5, max_tokens=1), allow_stop=True)
        prefill = [
            _chunk(0, range(1, 1 + num_tokens // 2), table),
            _chunk(num_tokens // 2, range(num_tokens - num_tokens // 2), table, spec),
        ]
        steps = [[chunk] for chunk in prefill if chunk.token_ids]
        steps += [[_chunk(num_tokens, (1,), table, spec)] * rows for rows in (1, 2, 16)]
        for index, chunks in enumerate(steps):
            self.execute(StepPlan(chunks=tuple(chunks)))
            progress((index + 1) / len(steps))
        again = StepPlan(chunks=tuple(steps[0]))
        measured = MeasuredStep(again.num_tokens, self.execute(again).duration_s)
        self._kv_cache.tensor[:num_blocks].zero_()
        return measured

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutput:
        """Write the KV of the plan's tokens and draw the tokens it asks for.

        Returns or raises once the device has done all that it was given. Raises:
            ValueError: the plan is malformed (a bug of the caller's).
            DeviceMemoryError: the step needs more memory than there is; other steps may not.
            DeviceLostError: the device cannot be used again.
        """
        begin = time.perf_counter()
        try:
            ran = self._complete(plan)
        except (torch.OutOfMemoryError, MemoryError) as error:
            lacked = str(error)
        else:
            duration_s = time.perf_counter() - begin
            return StepOutput(tokens=tuple(ran.tokens), duration_s=duration_s, reports=ran.reports)
        # Not before the error is gone, whose traceback has the step's tensors.
        if self._backend.memory is not None:
            self._backend.memory.release_unused()
        raise DeviceMemoryError(lacked)

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> Tensor:
        """Write the KV and return the logits after every token, in plan order.

        For checks: no worker asks for them. Returns [plan.num_tokens, vocab_size] float32.
        """
        inputs = build_inputs(plan, self._kv_cache.block_size, self._backend.device)
        lasts = zip(plan.chunks, inputs.last_rows, strict=True)
        rows = [np.arange(last + 1 - len(chunk.token_ids), last + 1) for chunk, last in lasts]
        return self._model.logits(self._forward(inputs, np.concatenate(rows)))

    def _complete(self, plan: StepPlan) -> _Ran:
        try:
            inputs = build_inputs(plan, self._kv_cache.block_size, self._backend.device)
            return self._run(plan.chunks, inputs)
        finally:  # whatever broke off: what came before it may still write blocks
            self._backend.synchronise()

    def _hidden(self, inputs: StepInputs, last_rows: Rows, told_of: Rows) -> Tensor:
        """Of both, one after the other; a row may be in both: [R, hidden_size]."""
        if not len(told_of):
            return self._forward(inputs, last_rows)
        rows, places = np.unique(np.concatenate((last_rows, told_of)), return_inverse=True)
        hidden = self._forward(inputs, rows)  # no row twice: a step has memory for its own
        return hidden.index_select(0, torch.from_numpy(places).to(hidden.device))

    def _run(self, chunks: Sequence[Chunk], inputs: StepInputs) -> _Ran:
        wanted = [
            (index, chunk.sample, chunk.end)
            for index, chunk in enumerate(chunks)
            if chunk.sample is not None
        ]
        ran = _Ran([None] * len(chunks), {})
        last_rows = inputs.last_rows[[index for index, _, _ in wanted]]
        told_of = ReportRows.of(chunks, inputs.last_rows)
        hidden = self._hidden(inputs, last_rows, told_of.rows)
        if wanted:
            logits = self._model.logits(hidden[: len(wanted)])
            # A device computes meanwhile: it was only told what to do.
            specs, refused = self._grammar_states.constrain([spec for _, spec, _ in wanted])
            drawn = self._backend.sample(logits, specs, [end for _, _, end in wanted])
            for row, ((index, _, _), token) in enumerate(zip(wanted, drawn, strict=True)):
                ran.tokens[index] = refused.get(row, token)
        if told_of.parts:
            for index, told in told_of.tell(hidden[len(wanted) :], self._model).items():
                if isinstance(told, LogitsError):
                    ran.tokens[index] = told
                else:
                    ran.reports[index] = told
        return ran


def _chunk(
    start: int, token_ids: Sequence[int], table: tuple[int, ...], spec: SampleSpec | None = None
) -> Chunk:
    return Chunk(token_ids=tuple(token_ids), start=start, block_table=table, sample=spec)

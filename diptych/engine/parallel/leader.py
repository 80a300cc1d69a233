"""Runs the steps of an engine whose model several processes share out, as their first one.

The scheduler knows of this process alone; the others are told each step's inputs and
compute along. Lives on the model thread.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from diptych.engine.backends.base import Backend, ForwardPass
from diptych.engine.device_copies import Send
from diptych.engine.inputs import StepInputs, build_inputs
from diptych.engine.kv.cache import KVCache
from diptych.engine.kv.device_handle import handle_of
from diptych.engine.kv.memory import KVMemory
from diptych.engine.launched_step import LaunchedStep, StepAtWork
from diptych.engine.model.decoder import Decoder
from diptych.engine.model.parts import Linear, Rows
from diptych.engine.model.ranks import Ranks
from diptych.engine.parallel.process_ranks import ProcessRanks
from diptych.engine.parallel.step_link import (
    RankClear,
    RankEnd,
    RankHead,
    RankMark,
    RankPoolGiven,
    RankStep,
    tell,
)
from diptych.engine.runner import Runner
from diptych.engine.scheduling.step import StepOutput, StepPlan
from diptych.errors import DeviceLostError
from diptych.text.grammars import NO_TOKENIZER, Grammars, NoGrammars


class Leader(Runner):
    """The runner of rank 0.

    When a step is over all ranks have completed it. One that fails here may leave the others
    anywhere within it: then the worker has to end. So all that runs steps raises
    DeviceLostError, whatever the reason.
    """

    def __init__(
        self,
        model: Decoder,
        kv_cache: KVCache,
        backend: Backend,
        ranks: ProcessRanks,
        links: Sequence[Connection],
        grammars: Grammars | NoGrammars = NO_TOKENIZER,
        pools: Sequence[KVMemory] = (),
    ) -> None:
        """links: to the other ranks. pools: theirs from now on, where they were taken here.

        Raises DeviceLostError.
        """
        weights = replace(model.weights, head=_ToldHead(model.weights.head, ranks, links))
        super().__init__(Decoder(model.config, weights, model.ops), kv_cache, backend, grammars)
        self._told_pass = _ToldPass(self._forward, ranks, links)
        self._forward = self._told_pass
        self._ranks, self._links = ranks, links
        if pools:
            self._hand_over(pools)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        with _in_step():
            launched = super().launch(plan)
            if self.steps_in_flight > 1:
                tell(self._links, RankMark())
        return launched

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> Tensor:
        logits = super().logits(plan)
        self._end_step()
        return logits

    def _end(self, step: StepAtWork) -> StepOutput:
        with _in_step():
            output = super()._end(step)
            self._end_step()
        return output

    def clear(self, num_blocks: int) -> None:
        """In all ranks, before it returns."""
        with _in_step():
            tell(self._links, RankClear(num_blocks))
            super().clear(num_blocks)
            self._end_step()

    def _hand_over(self, pools: Sequence[KVMemory]) -> None:
        cache = self._kv_cache
        with _in_step():
            for link, pool in zip(self._links, pools, strict=True):
                given = RankPoolGiven(
                    handle_of(pool.bytes), cache.num_blocks, cache.block_size, cache.dtype
                )
                tell([link], given)
            self._end_step()

    def _inputs(self, plan: StepPlan, send: Send) -> StepInputs:
        inputs = build_inputs(plan, self._kv_cache.block_size)
        self._told_pass.host_inputs = inputs
        return inputs.sent_by(send)

    def _put_in(self, inputs: StepInputs, rows: Rows, tokens: Tensor, send: Send) -> None:
        super()._put_in(inputs, rows, tokens, send)
        self._told_pass.drawn = rows, tokens

    def _end_step(self) -> None:
        tell(self._links, RankEnd())
        self._ranks.meet()


@contextmanager
def _in_step() -> Iterator[None]:
    """What fails within leaves the ranks at different places. Raises DeviceLostError."""
    try:
        yield
    except DeviceLostError:
        raise
    except Exception as error:
        raise DeviceLostError(f"the ranks are out of step: {error!r}") from error


class _ToldPass:
    """A forward pass that all followers begin as well. Implements ``ForwardPass``."""

    def __init__(self, forward: ForwardPass, ranks: Ranks, links: Sequence[Connection]) -> None:
        # Of the pass that comes next, which takes them:
        self.host_inputs: StepInputs | None = None
        self.drawn: tuple[Rows, Tensor] | None = None  # rows, and the tokens that the host lacks
        self._forward, self._ranks, self._links = forward, ranks, links

    def __call__(self, inputs: StepInputs, rows: Rows) -> Tensor:
        told, self.host_inputs = self.host_inputs, None
        drawn, self.drawn = self.drawn, None
        assert told is not None, "a step begins with its inputs, and has one pass"
        tell(self._links, RankStep(told, rows, None if drawn is None else drawn[0]))
        if drawn is not None:
            self._ranks.share_first(drawn[1])
        return self._forward(inputs, rows)


class _ToldHead:
    """A head that all followers multiply with as well, each its rows. Implements ``Linear``."""

    def __init__(self, head: Linear, ranks: Ranks, links: Sequence[Connection]) -> None:
        self._head, self._ranks, self._links = head, ranks, links
        self.in_features, self.out_features = head.in_features, head.out_features

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        tell(self._links, RankHead(len(x)))
        self._ranks.share_first(x)
        return self._head(x, out)

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
from diptych.engine.inputs import StepInputs
from diptych.engine.kv.cache import KVCache
from diptych.engine.model.decoder import Decoder
from diptych.engine.model.parts import Linear, Rows
from diptych.engine.parallel.process_ranks import ProcessRanks
from diptych.engine.parallel.step_link import RankClear, RankEnd, RankHead, RankStep, tell
from diptych.engine.runner import Runner
from diptych.engine.scheduling.step import StepOutput, StepPlan
from diptych.errors import DeviceLostError
from diptych.text.grammars import Grammars


class Leader(Runner):
    """The runner of rank 0.

    Steps come one at a time, whatever the device. One that fails here may leave the others
    anywhere within it: then the worker has to end.
    """

    def __init__(
        self,
        model: Decoder,
        kv_cache: KVCache,
        backend: Backend,
        ranks: ProcessRanks,
        links: Sequence[Connection],
        grammars: Grammars | None = None,
    ) -> None:
        """links: to the other ranks."""
        weights = replace(model.weights, head=_ToldHead(model.weights.head, links))
        super().__init__(Decoder(model.config, weights, model.ops), kv_cache, backend, grammars)
        self._forward = _ToldPass(self._forward, links)
        self._ranks, self._links = ranks, links

    @property
    def steps_in_flight(self) -> int:
        return 1

    def execute(self, plan: StepPlan) -> StepOutput:
        """As a runner's; when it returns, all ranks have completed the step.

        Raises DeviceLostError, whatever the reason.
        """
        with _in_step():
            output = super().execute(plan)
            self._end_step()
        return output

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> Tensor:
        logits = super().logits(plan)
        self._end_step()
        return logits

    def _clear(self, num_blocks: int) -> None:
        """In all ranks, before it returns."""
        with _in_step():
            tell(self._links, RankClear(num_blocks))
            super()._clear(num_blocks)
            self._end_step()

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

    def __init__(self, forward: ForwardPass, links: Sequence[Connection]) -> None:
        self._forward, self._links = forward, links

    def __call__(self, inputs: StepInputs, rows: Rows) -> Tensor:
        tell(self._links, RankStep(inputs, rows))
        return self._forward(inputs, rows)


class _ToldHead:
    """A head that all followers multiply with as well, each its rows. Implements ``Linear``."""

    def __init__(self, head: Linear, links: Sequence[Connection]) -> None:
        self._head, self._links = head, links
        self.in_features, self.out_features = head.in_features, head.out_features

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        tell(self._links, RankHead(x))
        return self._head(x, out)

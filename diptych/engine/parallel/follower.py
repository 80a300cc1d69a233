"""Computes along with the leader, in any other rank. Knows neither sequences nor samples."""

from collections import deque
from multiprocessing.connection import Connection
from typing import NoReturn

import torch

from diptych.engine.backends.base import Backend, ForwardPass, Mark
from diptych.engine.kv.cache import KVCache
from diptych.engine.kv.device_handle import OpenedKVMemory
from diptych.engine.model.decoder import Decoder
from diptych.engine.model.ranks import Ranks
from diptych.engine.parallel.process_ranks import ProcessRanks
from diptych.engine.parallel.step_link import (
    RankClear,
    RankEnd,
    RankHead,
    RankMark,
    RankPoolGiven,
    RankStep,
    hear,
)


class Follower:
    """One rank but the first. On its process's one thread."""

    def __init__(
        self, model: Decoder, kv_cache: KVCache | None, backend: Backend, ranks: ProcessRanks
    ) -> None:
        """kv_cache: of this rank's heads, in blocks with the leader's ids; None: it will say."""
        self._model, self._backend, self._ranks = model, backend, ranks
        self._kv_cache: KVCache | None = None
        self._forward: ForwardPass | None = None
        self._marks: deque[Mark] = deque()  # behind each step in flight, the oldest first
        if kv_cache is not None:
            self._use(kv_cache)

    @torch.inference_mode()
    def run(self, link: Connection) -> NoReturn:
        """Until the leader is gone. Raises EOFError then, DeviceLostError."""
        while True:
            match hear(link):
                case RankStep() as step:
                    self._compute(step)
                case RankMark():
                    self._marks.append(self._backend.mark())
                case RankHead(num_rows):
                    self._multiply(num_rows, self._ranks)
                case RankPoolGiven() as given:
                    self._use(self._opened(given))
                case RankClear(num_blocks):
                    assert self._kv_cache is not None, "a pool comes before it is cleared"
                    self._kv_cache.clear(num_blocks)
                case RankEnd():
                    self._wait()
                    self._ranks.meet()

    def _use(self, kv_cache: KVCache) -> None:
        self._kv_cache = kv_cache
        self._forward = self._backend.forward_pass(self._model, kv_cache)

    def _compute(self, step: RankStep) -> None:
        assert self._forward is not None, "a pool comes before any step"
        send = self._backend.begin_step()
        inputs = step.inputs.sent_by(send)
        if step.drawn is not None:
            tokens = inputs.token_ids.new_empty(len(step.drawn))
            self._ranks.share_first(tokens)
            inputs.token_ids.index_copy_(0, send(step.drawn), tokens)
        self._forward(inputs, step.rows)

    def _wait(self) -> None:
        """For the oldest step, or, of what was no launched step, for all."""
        if self._marks:
            self._marks.popleft().wait()
        else:
            self._backend.synchronise()

    def _multiply(self, num_rows: int, ranks: Ranks) -> None:
        weights = self._model.weights
        device = weights.embedding.device
        x = torch.empty(num_rows, weights.head.in_features, dtype=weights.dtype, device=device)
        ranks.share_first(x)
        weights.head(x)

    def _opened(self, given: RankPoolGiven) -> KVCache:
        return KVCache(
            self._model.config,
            given.num_blocks,
            given.block_size,
            given.dtype,
            lambda _: OpenedKVMemory(given.handle),
        )

"""Computes along with the leader, in any other rank. Knows neither sequences nor samples."""

from multiprocessing.connection import Connection
from typing import NoReturn

import torch

from diptych.engine.backends.base import Backend
from diptych.engine.kv.cache import KVCache
from diptych.engine.model.decoder import Decoder
from diptych.engine.parallel.process_ranks import ProcessRanks
from diptych.engine.parallel.step_link import RankClear, RankEnd, RankHead, RankStep, hear


class Follower:
    """One rank but the first. On its process's one thread."""

    def __init__(
        self, model: Decoder, kv_cache: KVCache, backend: Backend, ranks: ProcessRanks
    ) -> None:
        """kv_cache: of this rank's heads, in blocks with the leader's ids."""
        self._model, self._backend, self._ranks = model, backend, ranks
        self._kv_cache = kv_cache
        self._forward = backend.forward_pass(model, kv_cache)

    @torch.inference_mode()
    def run(self, link: Connection) -> NoReturn:
        """Until the leader is gone. Raises EOFError then, DeviceLostError."""
        while True:
            match hear(link):
                case RankStep(inputs, rows):
                    self._forward(inputs, rows)
                case RankHead(x):
                    self._model.weights.head(x)
                case RankClear(num_blocks):
                    self._kv_cache.clear(num_blocks)
                case RankEnd():
                    self._backend.synchronise()
                    self._ranks.meet()

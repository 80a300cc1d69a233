"""What the process of any rank but a worker's first does.

It computes along with the worker that started it, with its own part of the weights and of
the KV heads: its pool has these of each block, in memory that it takes itself on a host, and the
worker on a device. It serves nobody; others read its pool by the worker's agents.
"""

import logging
import os
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import NamedTuple

import torch

from diptych.engine.backends.base import Backend
from diptych.engine.backends.choice import make_backend
from diptych.engine.kv.cache import KVCache
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.decoder import Decoder
from diptych.engine.model.weights import load_weights
from diptych.engine.parallel.follower import Follower
from diptych.engine.parallel.process_ranks import ProcessRanks
from diptych.errors import ConfigurationError
from diptych.process import EXIT_CONFIGURATION, EXIT_FAILED
from diptych.telemetry import logs
from diptych.worker.rank_setup import RankSetup, RankWord, hear_setup, send

logger = logging.getLogger(__name__)


class RankParts(NamedTuple):
    """What a rank has before its weights."""

    config: ModelConfig  # of the whole model
    own_config: ModelConfig
    backend: Backend
    cache: KVCache | None  # in memory of the host; on a device rank 0 gives it

    @classmethod
    def of(cls, setup: RankSetup) -> "RankParts":
        """Raises ConfigurationError."""
        config = setup.model_config
        own, backend = (
            setup.share.of(config),
            make_backend(setup.device, setup.share, setup.prefill_attention),
        )
        if setup.num_blocks is None:
            return cls(config, own, backend, None)
        cache = KVCache(own, setup.num_blocks, setup.block_size, setup.kv_dtype, backend.kv_memory)
        if cache.memory.shared_fd is None:
            raise ConfigurationError("tensor_parallel: this system has no memory to share")
        return cls(config, own, backend, cache)

    @property
    def pool_fd(self) -> int | None:
        """Of the cache's memory, if that was taken here."""
        return None if self.cache is None else self.cache.memory.shared_fd


def decoder_of(setup: RankSetup, parts: RankParts, ranks: ProcessRanks) -> Decoder:
    """With this rank's weights. Raises ConfigurationError; DeviceLostError: another is gone."""
    store = parts.backend.weights(setup.dtype, "none")
    weights = load_weights(setup.folder, parts.config, store, ranks=ranks)
    layer_ops = parts.backend.layer_ops(parts.own_config, setup.dtype)
    return Decoder(parts.own_config, weights, layer_ops)


def follow(link: Connection) -> int:
    """Until the worker is gone; the exit code."""
    try:
        return _follow(link)
    finally:
        logs.flush()


def _follow(link: Connection) -> int:
    try:
        setup = hear_setup(link)
        logs.set_up(setup.service, setup.log_level)
        torch.set_num_threads(setup.num_threads)
        try:
            parts = RankParts.of(setup)
            send(link, RankWord())
            if parts.pool_fd is not None:
                send_handle(link, parts.pool_fd, os.getppid())
            ranks = ProcessRanks(setup.share, setup.meeting_file, parts.backend.device)
            decoder = decoder_of(setup, parts, ranks)
            follower = Follower(decoder, parts.cache, parts.backend, ranks)
        except ConfigurationError as error:
            send(link, RankWord(error.message))
            return EXIT_CONFIGURATION
        send(link, RankWord(files=decoder.weights.source.files))
        follower.run(link)
    except (EOFError, OSError):
        return 0
    except Exception as error:
        logger.critical("a rank failed", exc_info=error)
        return EXIT_FAILED

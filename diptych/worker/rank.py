"""What the process of any rank but a worker's first does.

It computes along with the worker that started it, on that one's KV pool, with its own
part of the weights; it serves nobody.
"""

import logging
from multiprocessing.connection import Connection

import torch

from diptych.engine.backends.choice import make_backend
from diptych.engine.kv.cache import KVCache
from diptych.engine.kv.memory import MappedKVMemory
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


def follower_of(setup: RankSetup, pool_fd: int) -> Follower:
    """This rank's part of the model, on the worker's pool.

    Raises ConfigurationError; DeviceLostError: another rank is gone.
    """
    torch.set_num_threads(setup.num_threads)
    config = ModelConfig.from_folder(setup.folder)
    own = setup.share.of(config)
    backend = make_backend("cpu")
    ranks = ProcessRanks(setup.share, setup.meeting_file)
    weights = load_weights(setup.folder, config, backend.weights(setup.dtype, "none"), ranks=ranks)
    decoder = Decoder(own, weights, backend.layer_ops(own, setup.dtype))
    cache = KVCache(
        config,
        setup.num_blocks,
        setup.block_size,
        setup.kv_dtype,
        lambda num_bytes: MappedKVMemory(pool_fd, num_bytes),
        setup.share.part(config.num_kv_heads),
    )
    return Follower(decoder, cache, backend, ranks)


def follow(link: Connection, pool_fd: int) -> int:
    """Until the worker is gone; the exit code."""
    try:
        return _follow(link, pool_fd)
    finally:
        logs.flush()


def _follow(link: Connection, pool_fd: int) -> int:
    try:
        setup = hear_setup(link)
        logs.set_up(setup.service, setup.log_level)
        send(link, RankWord())
        try:
            follower = follower_of(setup, pool_fd)
        except ConfigurationError as error:
            send(link, RankWord(error.message))
            return EXIT_CONFIGURATION
        send(link, RankWord())
        follower.run(link)
    except (EOFError, OSError):
        return 0
    except Exception as error:
        logger.critical("a rank failed", exc_info=error)
        return EXIT_FAILED

"""Two ranks of one engine in one process: the second one in a thread of its own."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import torch

from diptych.engine.backends.base import Backend
from diptych.engine.kv.cache import KVCache
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.decoder import Decoder
from diptych.engine.model.rank_share import RankShare
from diptych.engine.model.weights import load_weights
from diptych.engine.parallel.follower import Follower
from diptych.engine.parallel.leader import Leader
from diptych.engine.parallel.process_ranks import ProcessRanks

SIZE = 2


class RankParts:
    """What one rank has."""

    def __init__(
        self, folder: Path, cache: KVCache, rank: int, meeting_file: Path, backend: Backend
    ) -> None:
        """cache: of this rank's heads."""
        config, share = ModelConfig.from_folder(folder), RankShare(rank, SIZE)
        self.ranks = ProcessRanks(share, meeting_file)
        store = backend.weights(torch.float32, "none")
        weights = load_weights(folder, config, store, ranks=self.ranks)
        own = share.of(config)
        self.decoder = Decoder(own, weights, backend.layer_ops(own, weights.dtype))
        self.cache = cache


def rank_caches(
    folder: Path, num_blocks: int, block_size: int, dtype: torch.dtype = torch.float32
) -> list[KVCache]:
    """Of each rank its own."""
    config = ModelConfig.from_folder(folder)
    own = [RankShare(rank, SIZE).of(config) for rank in range(SIZE)]
    return [KVCache(each, num_blocks, block_size, dtype) for each in own]


@contextmanager
def two_ranks(
    folder: Path, caches: Sequence[KVCache], meeting_file: Path, backend: Backend
) -> Iterator[Leader]:
    """The runner of both; the second one ends with the block."""
    ours, theirs = Pipe()

    def follow(link: Connection) -> None:
        torch.set_num_threads(1)
        parts = RankParts(folder, caches[1], 1, meeting_file, backend)
        with suppress(EOFError):
            Follower(parts.decoder, parts.cache, backend, parts.ranks).run(link)

    thread = threading.Thread(target=follow, args=(theirs,), daemon=True)
    thread.start()
    parts = RankParts(folder, caches[0], 0, meeting_file, backend)
    try:
        yield Leader(parts.decoder, parts.cache, backend, parts.ranks, [ours])
    finally:
        ours.close()
        thread.join()
        theirs.close()

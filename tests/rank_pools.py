"""Pools of several ranks, with nobody who computes."""

from diptych.engine.kv.shared_bytes import SharedBytes
from kvtransfer.memory import HostMemory
from kvtransfer.rank_pools import RankPools


class RankMemory(HostMemory):
    """One rank's pool; keeps its file open."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self._shared = SharedBytes(num_blocks * block_bytes)
        super().__init__(self._shared.buffer, block_bytes, self._shared.fd)


def pools_of(
    num_ranks: int, num_blocks: int, block_bytes: int, stretch_bytes: int
) -> RankMemory | RankPools:
    """Both sizes are of whole blocks."""
    own_bytes = block_bytes // num_ranks
    ranks = [RankMemory(num_blocks, own_bytes) for _ in range(num_ranks)]
    return ranks[0] if num_ranks == 1 else RankPools(ranks, stretch_bytes)

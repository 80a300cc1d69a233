"""The engine's KV cache as the transfer's pool of blocks, whatever memory it is in."""

from collections.abc import Sequence

from diptych.engine.kv.cache import KVCache
from diptych.engine.kv.memory import KVMemory
from diptych.worker.device_pool import DevicePool
from diptych.worker.device_rank_pools import DeviceRankPools
from kvtransfer.memory import HostMemory, PoolMemory
from kvtransfer.rank_pools import RankPools


def pool_memory(cache: KVCache) -> PoolMemory:
    """The blocks of ``cache``, which has to live as long."""
    return DevicePool(cache) if cache.memory.kind != "DRAM" else _host_memory(cache.memory, cache)


def rank_pools(cache: KVCache, others: Sequence[KVMemory]) -> RankPools:
    """The blocks of rank 0's cache and of the other ranks' pools, which have to live as long.

    Raises ConfigurationError: what a rank has of a block is too odd.
    """
    memories = (cache.memory, *others)
    stretch_bytes = cache.value_runs * cache.layout.run_bytes * len(memories)
    if cache.memory.kind != "DRAM":
        return DeviceRankPools([DevicePool(cache, each) for each in memories], stretch_bytes)
    return RankPools([_host_memory(each, cache) for each in memories], stretch_bytes)


def _host_memory(memory: KVMemory, cache: KVCache) -> HostMemory:
    return HostMemory(memory.bytes.numpy(), cache.block_bytes, memory.shared_fd)

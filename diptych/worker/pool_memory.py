"""The engine's KV cache as the transfer's pool of blocks."""

import torch

from diptych.engine.kv.cache import KVCache
from kvtransfer.memory import HostMemory


def pool_memory(cache: KVCache) -> HostMemory:
    """The blocks of ``cache``, which has to be in host memory and to live as long.

    A cache on a device gets a ``PoolMemory`` of its own here.
    """
    buffer = cache.tensor.view(-1).view(torch.uint8).numpy()
    return HostMemory(buffer, cache.block_bytes, cache.shared_fd)

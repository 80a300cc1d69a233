"""The engine's KV cache as the transfer's pool of blocks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from diptych.engine.kv.cache import KVCache
from diptych.engine.kv.memory import DeviceKVMemory, KVMemory, SummingMemory
from diptych.engine.kv.shared_bytes import SharedBytes
from diptych.errors import DeviceLostError
from kvtransfer.digest import Coverage, block_digest, words_of
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
    assert all(each.kind == "DRAM" for each in memories), "ranks on devices"
    stretch_bytes = cache.value_runs * cache.layout.run_bytes * len(memories)
    return RankPools([_host_memory(each, cache) for each in memories], stretch_bytes)


def _host_memory(memory: KVMemory, cache: KVCache) -> HostMemory:
    return HostMemory(memory.bytes.numpy(), cache.block_bytes, memory.shared_fd)


class DevicePool:
    """A cache on a device: bytes are copied out and in, or read where they lie by others.

    Implements ``DeviceCopies``. Used by the transfer thread. Copies wait for whatever the device is
    at, so for the steps in flight; digests do not, where the device sums: blocks are announced
    when their step is over, and what was to land in others has when they are asked about. Staging
    blocks are copied beside the steps, for the same reason.
    """

    memory_kind = "VRAM"
    shared_fd = None

    def __init__(self, cache: KVCache) -> None:
        memory = cache.memory
        assert isinstance(memory, DeviceKVMemory)
        self._memory = memory
        self._staged: list[SharedBytes] = []
        self._blocks = cache.memory.bytes.view(cache.num_blocks, cache.block_bytes)
        self.base_address = self._blocks.data_ptr()
        self.block_bytes, self.num_blocks = cache.block_bytes, cache.num_blocks
        self.device_id = memory.device_id
        self.lost: DeviceLostError | None = None

    def read(
        self, block_ids: Sequence[int], begin: int, end: int, num_bytes: int | None = None
    ) -> bytes:
        size = num_bytes or self.block_bytes
        first = begin // size
        wanted = self._checked(block_ids[first : -(-end // size)])
        with self._used():
            self._memory.synchronise()  # what lands from elsewhere is not torch's to wait for
            run = self._blocks[wanted, :size].view(-1)
            start = first * size
            return run[begin - start : end - start].cpu().numpy().tobytes()

    def write(
        self, block_ids: Sequence[int], offset: int, payload: bytes, num_bytes: int | None = None
    ) -> None:
        size = num_bytes or self.block_bytes
        rest = torch.from_numpy(np.frombuffer(payload, np.uint8).copy())
        with self._used():
            for block_id in self._checked(block_ids):
                part = rest[: size - offset]
                self._blocks[block_id, offset : offset + len(part)] = part.to(self._blocks.device)
                rest, offset = rest[len(part) :], 0
            self._memory.synchronise()
        if len(rest):
            raise IndexError(f"{len(rest)} bytes too many for {len(block_ids)} blocks")

    def digests(self, block_ids: Sequence[int], coverages: Sequence[Coverage]) -> tuple[bytes, ...]:
        """Where they lie, if the device can; else on copies."""
        memory = self._memory
        if not isinstance(memory, SummingMemory):
            content = memoryview(self.read(block_ids, 0, len(block_ids) * self.block_bytes))
            return tuple(
                block_digest(content[place * self.block_bytes :][: self.block_bytes], coverage)
                for place, coverage in enumerate(coverages)
            )
        begins = [block_id * self.block_bytes for block_id in self._checked(block_ids)]
        sizes = [
            self.block_bytes if each.num_bytes is None else min(each.num_bytes, self.block_bytes)
            for each in coverages
        ]
        with self._used():
            sums = memory.word_sums(words_of(begins, sizes, coverages))
        return tuple(each.digest(size) for each, size in zip(sums, sizes, strict=True))

    def new_staging(self, num_blocks: int) -> HostMemory:
        shared = SharedBytes(num_blocks * self.block_bytes)
        self._memory.pin(shared.buffer)
        self._staged.append(shared)  # it closes its file when it goes
        return HostMemory(shared.buffer, self.block_bytes, shared.fd)

    def copy_out(
        self,
        block_ids: Sequence[int],
        staging: HostMemory,
        slots: Sequence[int],
        num_bytes: int | None = None,
    ) -> Callable[[], bool]:
        rows = self._rows(block_ids, staging, slots, num_bytes or self.block_bytes)

        def copies() -> None:
            for ours, theirs in rows:
                theirs.copy_(ours, non_blocking=True)

        return self._beside(copies)

    def copy_in(
        self,
        staging: HostMemory,
        slots: Sequence[int],
        block_ids: Sequence[int],
        num_bytes: int | None = None,
    ) -> Callable[[], bool]:
        rows = self._rows(block_ids, staging, slots, num_bytes or self.block_bytes)

        def copies() -> None:
            for ours, theirs in rows:
                ours.copy_(theirs, non_blocking=True)

        return self._beside(copies)

    def _rows(
        self, block_ids: Sequence[int], staging: HostMemory, slots: Sequence[int], num_bytes: int
    ) -> list[tuple[Tensor, Tensor]]:
        """The first bytes of each block, on the device and where it is staged."""
        blocks = [self._blocks[block_id, :num_bytes] for block_id in self._checked(block_ids)]
        staged = [
            torch.frombuffer(staging.block(slot), dtype=torch.uint8, count=num_bytes)
            for slot in slots
        ]
        return list(zip(blocks, staged, strict=True))

    def _beside(self, copies: Callable[[], None]) -> Callable[[], bool]:
        with self._used():
            is_over = self._memory.beside(copies)

        def used() -> bool:
            with self._used():
                return is_over()

        return used

    @contextmanager
    def _used(self) -> Iterator[None]:
        """While the device is asked for something: an error of it tells whether it is lost."""
        try:
            try:
                yield
            except RuntimeError:  # torch's; only waiting tells of what it is
                self._memory.synchronise()
                raise
        except DeviceLostError as error:
            self.lost = error
            raise

    def _checked(self, block_ids: Sequence[int]) -> list[int]:
        for block_id in block_ids:
            if not 0 <= block_id < self.num_blocks:
                raise IndexError(f"block {block_id} of {self.num_blocks}")
        return list(block_ids)

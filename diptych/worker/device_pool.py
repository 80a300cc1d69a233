"""The engine's KV cache on a device as the transfer's pool of blocks."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from diptych.engine.kv.cache import KVCache
from diptych.engine.kv.memory import DeviceKVMemory, KVMemory
from diptych.engine.kv.shared_bytes import SharedBytes
from diptych.errors import DeviceLostError
from diptych.word_sums import Sums, total
from kvtransfer.block_shares import BlockShare
from kvtransfer.digest import Coverage, share_words, words_of
from kvtransfer.memory import HostMemory


class DevicePool:
    """A cache on a device: bytes are copied out and in, or read where they lie by others.

    Implements ``DeviceCopies``. Used by the transfer thread. Copies wait for whatever the device is
    at, so for the steps in flight; digests, which the device makes, do not: blocks are announced
    when their step is over, and what was to land in others has when they are asked about. Staging
    blocks are copied beside the steps, for the same reason.
    """

    memory_kind = "VRAM"
    shared_fd = None

    def __init__(self, cache: KVCache, memory: KVMemory | None = None) -> None:
        """memory: another rank's, with as many blocks as the cache, of the same kind."""
        memory = memory or cache.memory
        assert isinstance(memory, DeviceKVMemory)
        self._memory = memory
        self._staged: list[SharedBytes] = []
        self._blocks = memory.bytes.view(cache.num_blocks, cache.block_bytes)
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
        """Where they lie."""
        begins = [block_id * self.block_bytes for block_id in self._checked(block_ids)]
        sizes = [
            self.block_bytes if each.num_bytes is None else min(each.num_bytes, self.block_bytes)
            for each in coverages
        ]
        with self._used():
            sums = self._memory.word_sums(words_of(begins, sizes, coverages))
        return tuple(each.digest(size) for each, size in zip(sums, sizes, strict=True))

    def share_sums(
        self, block_ids: Sequence[int], coverages: Sequence[Coverage], share: BlockShare
    ) -> list[Sums]:
        begins = [block_id * self.block_bytes for block_id in self._checked(block_ids)]
        asked = share_words(begins, coverages, share)
        with self._used():
            sums = iter(self._memory.word_sums(asked.words))
        return [total(islice(sums, num_runs)) for num_runs in asked.num_runs]

    def new_staging(self, num_blocks: int, block_bytes: int | None = None) -> HostMemory:
        """block_bytes: of whole blocks, where this is a rank's pool."""
        size = block_bytes or self.block_bytes
        shared = SharedBytes(num_blocks * size)
        weakref.finalize(shared, self._memory.pin(shared.buffer)).atexit = False
        self._staged.append(shared)  # it closes its file when it goes
        return HostMemory(shared.buffer, size, shared.fd)

    def copy_out(
        self,
        block_ids: Sequence[int],
        staging: HostMemory,
        slots: Sequence[int],
        num_bytes: int | None = None,
        share: BlockShare | None = None,
    ) -> Callable[[], bool]:
        """share: what this pool has of whole blocks, which are staged, and ``num_bytes`` theirs."""
        rows = self._rows(block_ids, staging, slots, num_bytes, share)

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
        share: BlockShare | None = None,
    ) -> Callable[[], bool]:
        rows = self._rows(block_ids, staging, slots, num_bytes, share)

        def copies() -> None:
            for ours, theirs in rows:
                ours.copy_(theirs, non_blocking=True)

        return self._beside(copies)

    def _rows(
        self,
        block_ids: Sequence[int],
        staging: HostMemory,
        slots: Sequence[int],
        num_bytes: int | None,
        share: BlockShare | None,
    ) -> list[tuple[Tensor, Tensor]]:
        """What is copied at a time, on the device and where it is staged.

        The first bytes of each block; of a share each stretch's: others would not be copied
        beside the steps.
        """
        num_bytes = num_bytes or staging.block_bytes
        own_bytes = num_bytes // (1 if share is None else share.size)
        blocks = [self._blocks[block_id, :own_bytes] for block_id in self._checked(block_ids)]
        staged = [
            torch.frombuffer(staging.block(slot), dtype=torch.uint8, count=num_bytes)
            for slot in slots
        ]
        pairs = list(zip(blocks, staged, strict=True))
        if share is None:
            return pairs
        return [
            (ours, theirs)
            for block, stage in pairs
            for ours, theirs in zip(
                block.view(-1, share.own_bytes),
                stage.view(-1, share.size, share.own_bytes)[:, share.rank],
                strict=True,
            )
        ]

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

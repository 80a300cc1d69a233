"""Host memory beside a pool on a device, through which its blocks pass; and reads through it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvtransfer.errors import TransportError
from kvtransfer.memory import DeviceCopies, HostMemory
from kvtransfer.transports.base import Copy, Peer

_PARTS = 4  # of the staging blocks, that one copy takes one at the most
_SHARES = 2  # that one peer has one at the most: who stands still leaves the others some


class StagingSlots:
    """Which staging blocks are free. Used by one thread."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.most_at_once = max(1, num_slots // _PARTS)
        self.most_of_a_peer = max(1, num_slots // _SHARES)
        self._free = list(range(num_slots))

    @property
    def num_lent(self) -> int:
        return self.num_slots - len(self._free)

    def take(self, most: int) -> tuple[int, ...]:
        """Up to ``most``, and to ``most_at_once``; none if none is free. ``give_back`` follows."""
        num = max(0, min(most, self.most_at_once))
        slots, self._free = tuple(self._free[:num]), self._free[num:]
        return slots

    def give_back(self, slots: Sequence[int]) -> None:
        """Nothing reads or writes them any more."""
        assert not set(slots) & set(self._free)
        self._free = sorted([*self._free, *slots])  # neighbours are read as one


class Stage(NamedTuple):
    """A pool on a device with its staging blocks: one reader's, or one source's."""

    pool: DeviceCopies
    memory: HostMemory  # of the staging blocks; as large as the pool's
    slots: StagingSlots


class StagedPeer:
    """A source as the reader of a pool on a device reaches it: by way of staging blocks."""

    def __init__(self, stage: Stage, peer: Peer) -> None:
        """``peer``: the source as a transport of the staging blocks reaches it."""
        self.stage = stage
        self.num_lent = 0  # staging blocks, to its reads
        self._peer = peer

    @property
    def usable(self) -> bool:
        return self._peer.usable

    def read(
        self,
        source_block_ids: tuple[int, ...],
        local_block_ids: tuple[int, ...],
        num_bytes: int | None = None,
    ) -> "StagedCopy":
        return StagedCopy(self, source_block_ids, local_block_ids, num_bytes)

    def write(
        self,
        local_block_ids: tuple[int, ...],
        offset: int,
        payload: bytes,
        num_bytes: int | None = None,
    ) -> Copy:
        return self._peer.write(local_block_ids, offset, payload, num_bytes)

    def check_lane(self) -> None:
        self._peer.check_lane()

    def close(self) -> None:
        self._peer.close()

    def reading(
        self, source_block_ids: tuple[int, ...], slots: tuple[int, ...], num_bytes: int | None
    ) -> Copy:
        """A read into staging blocks. Raises TransportError."""
        copy = self._peer.read(source_block_ids, slots, num_bytes)
        assert copy is not None, "what is staged is read"
        return copy

    def lend(self, most: int) -> tuple[int, ...]:
        slots = self.stage.slots.take(min(most, self.stage.slots.most_of_a_peer - self.num_lent))
        self.num_lent += len(slots)
        return slots

    def give_back(self, slots: Sequence[int]) -> None:
        self.num_lent -= len(slots)
        self.stage.slots.give_back(slots)


class StagedCopy:
    """Blocks read into staging blocks and copied to the device from there, a part at a time.

    A part has its staging blocks until neither a read nor the device is at them. Terminal as
    every copy is; what failed has given them all back. Implements ``PartedCopy``.
    """

    wakes = False

    def __init__(
        self,
        peer: StagedPeer,
        source_block_ids: tuple[int, ...],
        local_block_ids: tuple[int, ...],
        num_bytes: int | None,
    ) -> None:
        self._peer = peer
        self._source_block_ids = source_block_ids  # still to be read
        self._local_block_ids = local_block_ids
        self._num_bytes = num_bytes
        self._slots: tuple[int, ...] = ()  # of the part under way
        self._step: Callable[[], bool] | None = None  # what it is at; True once that is over
        self._is_landing = False  # it is at the copy to the device
        self._is_stopped = False

    def post(self) -> bool:
        return self.poll()

    def poll(self) -> bool:
        """Raises TransportError; RuntimeError or DeviceLostError, of the device."""
        try:
            while self._source_block_ids:
                if not self._advance():
                    return False
        except BaseException:
            self._end_part()
            raise
        return True

    def stop(self) -> None:
        self._is_stopped = True

    def _advance(self) -> bool:
        """Whether a step ended, so that the next one can begin."""
        if self._step is not None and not self._step():
            return False
        if self._is_stopped:
            raise TransportError("it was given up")
        if self._step is None:
            return self._begin_part()
        if not self._is_landing:
            stage, num = self._peer.stage, len(self._slots)
            self._is_landing = True
            self._step = stage.pool.copy_in(
                stage.memory, self._slots, self._local_block_ids[:num], self._num_bytes
            )
            return True
        num = len(self._slots)
        self._source_block_ids = self._source_block_ids[num:]
        self._local_block_ids = self._local_block_ids[num:]
        self._end_part()
        return True

    def _begin_part(self) -> bool:
        self._slots = self._peer.lend(len(self._source_block_ids))
        if not self._slots:
            return False
        wanted = self._source_block_ids[: len(self._slots)]
        copy = self._peer.reading(wanted, self._slots, self._num_bytes)
        is_done = copy.post()
        self._step = (lambda: True) if is_done else copy.poll
        return True

    def _end_part(self) -> None:
        slots, self._slots = self._slots, ()
        self._step, self._is_landing = None, False
        self._peer.give_back(slots)

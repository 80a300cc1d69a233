"""Reads through staging blocks: bounded, in order of the blocks, and none is ever left behind."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.errors import TransportError
from kvtransfer.memory import HostMemory
from kvtransfer.transports.staging import Stage, StagedPeer, StagingSlots
from tests.device_memory import DeviceMemory

SIZE = 16


class Read:
    """One of a source's blocks into staging blocks; it ends when it is told."""

    def __init__(self, do: Callable[[], None]) -> None:
        self._do = do
        self.error: TransportError | None = None
        self.may_end = False

    wakes = True

    def post(self) -> bool:
        return False

    def poll(self) -> bool:
        if self.error is not None:
            raise self.error
        if self.may_end:
            self._do()
        return self.may_end


class Near:
    """A source as its peer in host memory."""

    usable = True

    def __init__(self, source: HostMemory, staging: HostMemory) -> None:
        self._source, self._staging = source, staging
        self.reads: list[Read] = []

    def read(
        self, source_ids: tuple[int, ...], slots: tuple[int, ...], num_bytes: int | None = None
    ) -> Read:
        def move() -> None:
            for source_id, slot in zip(source_ids, slots, strict=True):
                self._staging.block(slot)[:num_bytes] = self._source.block(source_id)[:num_bytes]

        self.reads.append(Read(move))
        return self.reads[-1]

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


def made(num_slots: int) -> tuple[StagedPeer, Near, DeviceMemory, HostMemory]:
    source = HostMemory(bytearray(range(64)) * 8, SIZE)
    pool = DeviceMemory(bytearray(32 * SIZE), SIZE)
    staging = HostMemory(bytearray(num_slots * SIZE), SIZE)
    near = Near(source, staging)
    peer = StagedPeer(Stage(pool, staging, StagingSlots(num_slots)), near)
    return peer, near, pool, source


@given(
    num_slots=st.integers(1, 9),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    num_bytes=st.sampled_from([None, 5]),
    order=st.randoms(use_true_random=False),
)
def test_any_order_of_ends_brings_every_block_and_frees_all(
    num_slots: int, sizes: list[int], num_bytes: int | None, order: Any
) -> None:
    peer, near, pool, source = made(num_slots)
    local_ids, source_ids = iter(range(32)), iter(range(31, -1, -1))
    wanted = [
        (tuple(next(source_ids) for _ in range(n)), tuple(next(local_ids) for _ in range(n)))
        for n in sizes
    ]
    copies = [peer.read(theirs, ours, num_bytes) for theirs, ours in wanted]
    slots = peer.stage.slots
    unfinished = [copy for copy in copies if not copy.post()]
    for _ in range(2000):
        if not unfinished:
            break
        assert slots.num_lent == peer.num_lent <= slots.most_of_a_peer
        assert pool.most_copying <= num_slots
        for read in near.reads:
            read.may_end = read.may_end or order.random() < 0.5
        copy = order.choice(unfinished)
        if copy.poll():
            unfinished.remove(copy)
    assert not unfinished
    assert slots.num_lent == 0
    for theirs, ours in wanted:
        size = SIZE * len(ours) if num_bytes is None else num_bytes * len(ours)
        assert pool.read(ours, 0, size, num_bytes) == source.read(theirs, 0, size, num_bytes)


def test_a_read_that_fails_gives_its_staging_blocks_back() -> None:
    peer, near, _, _ = made(4)
    copy = peer.read((1, 2), (3, 4))
    assert not copy.post()
    assert peer.stage.slots.num_lent == 1
    near.reads[0].error = TransportError("gone")
    with pytest.raises(TransportError):
        copy.poll()
    assert peer.num_lent == peer.stage.slots.num_lent == 0


def test_a_device_that_fails_gives_them_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    peer, near, pool, _ = made(4)
    copy = peer.read((1,), (3,))
    assert not copy.post()
    near.reads[0].may_end = True

    def fails(*_: object) -> Callable[[], bool]:
        raise RuntimeError("the device")

    monkeypatch.setattr(pool, "copy_in", fails)
    with pytest.raises(RuntimeError):
        copy.poll()
    assert peer.stage.slots.num_lent == 0


def test_who_stands_still_leaves_others_some() -> None:
    peer, near, _, _ = made(8)
    other = StagedPeer(peer.stage, near)
    still = [peer.read((n,), (n,)) for n in range(10)]
    assert not any(copy.post() for copy in still)
    assert peer.num_lent == 4
    assert not other.read((20,), (20,)).post()
    assert other.num_lent == 1


def test_what_is_given_up_ends_with_the_part_under_way_and_begins_no_other() -> None:
    """As many parts as the others leave it room for would be read, and written, for nobody."""
    peer, near, pool, _ = made(4)
    reading, waiting = peer.read((1, 2, 3), (1, 2, 3)), peer.read((4,), (4,))
    third = peer.read((5,), (5,))
    assert not any(copy.post() for copy in (reading, third, waiting))
    assert len(near.reads) == peer.num_lent == 2, "the last of them waits for its turn"
    for copy in (reading, waiting):
        copy.stop()
    with pytest.raises(TransportError, match="given up"):
        waiting.poll()
    assert not reading.poll(), "its staging block may still be written"
    near.reads[0].may_end = True
    with pytest.raises(TransportError, match="given up"):
        reading.poll()
    assert len(near.reads) == 2
    assert peer.num_lent == 1
    assert pool.read((1,), 0, SIZE) == bytes(SIZE), "nor is it copied to the device"
    near.reads[1].may_end = True
    while not third.poll():
        pass
    assert peer.num_lent == 0

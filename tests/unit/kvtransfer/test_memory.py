"""A pool of blocks in host memory, and that the transfer needs no more of one than it offers."""

import pytest

from kvtransfer.digest import Coverage, block_digest, coverages
from kvtransfer.memory import HostMemory
from kvtransfer.transports.inline import InlineTransport
from tests.device_memory import DeviceMemory


@pytest.mark.parametrize("make", [HostMemory, DeviceMemory])
def test_what_is_read_of_some_blocks_can_be_written_to_others(
    make: type[HostMemory] | type[DeviceMemory],
) -> None:
    source, target = make(bytearray(range(80)), 8), make(bytearray(80), 8)
    peer = InlineTransport(target).connect(None)
    ids, local = (7, 2, 3), (1, 9, 4)
    for begin in range(0, 24, 5):
        payload = source.read(ids, begin, min(begin + 5, 24))
        touched = local[begin // 8 : -(-(begin + len(payload)) // 8)]
        assert peer.write(touched, begin % 8, payload).post()
    assert target.read(local, 0, 24) == source.read(ids, 0, 24)
    assert not any(target.read((0, 2, 3, 5, 6, 7, 8), 0, 56))


@pytest.mark.parametrize("make", [HostMemory, DeviceMemory])
def test_digests_are_of_the_bytes_that_are_covered(
    make: type[HostMemory] | type[DeviceMemory],
) -> None:
    memory = make(bytearray(range(200)) * 41, 4100)
    contents = [memory.read((block_id,), 0, 4100) for block_id in (1, 0)]
    for seed in (0, 7):
        expected = [
            block_digest(content, Coverage(seed, 5 + i)) for i, content in enumerate(contents)
        ]
        assert (
            list(memory.digests((1, 0), coverages([4100, 4100], seed, first_place=5))) == expected
        )


def test_memory_is_whole_blocks_and_bounded() -> None:
    with pytest.raises(ValueError, match="whole blocks"):
        HostMemory(bytearray(10), 4)
    with pytest.raises(ValueError, match="writable"):
        HostMemory(b"12345678", 4)
    memory = HostMemory(bytearray(8), 4)
    with pytest.raises(IndexError):
        memory.block(2)
    with pytest.raises(IndexError):
        memory.block(-1)
    with pytest.raises(IndexError):
        memory.read((0, 2), 0, 8)
    with pytest.raises(IndexError):
        memory.digests((2,), coverages([8]))
    with pytest.raises(IndexError, match="2 bytes too many"):
        memory.write((0,), 2, b"1234")


@pytest.mark.parametrize("num_bytes", [1, 5, 8])
def test_parts_of_blocks_are_laid_one_after_another(num_bytes: int) -> None:
    memory = HostMemory(bytearray(range(32)), 8)
    block_ids = (2, 0, 3)
    parts = b"".join(bytes(memory.block(block_id)[:num_bytes]) for block_id in block_ids)
    for begin in range(len(parts)):
        for end in range(begin + 1, len(parts) + 1):
            assert memory.read(block_ids, begin, end, num_bytes) == parts[begin:end]
    before = bytes(memory.block(0))
    memory.write((0, 3), num_bytes - 1, b"ab"[:2], num_bytes)
    assert bytes(memory.block(0)) == before[: num_bytes - 1] + b"a" + before[num_bytes:]
    assert bytes(memory.block(3))[:1] == b"b"
    with pytest.raises(IndexError):
        memory.write((0,), 0, bytes(num_bytes + 1), num_bytes)

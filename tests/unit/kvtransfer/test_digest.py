"""What digests find: everything at level full, at level sampled as often as is said."""

import random

import pytest

from diptych.v1 import kv_source_pb2
from kvtransfer.digest import (
    LINE_BYTES,
    STRATUM_LINES,
    WHOLE,
    Coverage,
    block_digest,
    descriptor_digest,
    sampled_lines,
)
from tests.word_sums import defined

PAGE_BYTES = 4096
NUM_LINES = 1024
BLOCK = random.Random(1).randbytes(NUM_LINES * LINE_BYTES)
NUM_TRIES = 2000


def found_ratio(damage_lines: int, seed: int = 7) -> float:
    """How often a run of damaged whole lines at a random place is found."""
    rng, num_found = random.Random(seed), 0
    for _ in range(NUM_TRIES):
        coverage = Coverage(rng.randrange(1, 2**64), rng.randrange(64))
        first = rng.randrange(NUM_LINES - damage_lines + 1)
        lines = sampled_lines(coverage, NUM_LINES)
        num_found += bool(((lines >= first) & (lines < first + damage_lines)).any())
    return num_found / NUM_TRIES


def test_a_whole_digest_is_of_every_byte() -> None:
    assert block_digest(BLOCK) == block_digest(BLOCK, WHOLE) == defined(BLOCK)


def test_a_sample_is_one_line_of_each_stratum_drawn_anew_for_each_seed() -> None:
    for num_lines in (1, 5, 32, 33, 1000):
        for place in range(40):
            lines = sampled_lines(Coverage(3, place), num_lines)
            assert [line // STRATUM_LINES for line in lines] == list(range(-(-num_lines // 32)))
            assert lines[-1] < num_lines
    seeds = [tuple(sampled_lines(Coverage(seed), NUM_LINES)) for seed in range(1, 20)]
    assert len(set(seeds)) == len(seeds)


def test_stale_blocks_and_torn_pages_are_always_found() -> None:
    rng = random.Random(2)
    for _ in range(300):
        coverage = Coverage(rng.randrange(1, 2**64), rng.randrange(64))
        torn = bytearray(BLOCK)
        begin = rng.randrange(len(BLOCK) - PAGE_BYTES + 1)  # not even aligned
        torn[begin : begin + PAGE_BYTES] = rng.randbytes(PAGE_BYTES)
        assert block_digest(torn, coverage) != block_digest(BLOCK, coverage)
        assert block_digest(rng.randbytes(len(BLOCK)), coverage) != block_digest(BLOCK, coverage)


@pytest.mark.parametrize("num_lines", [1, 8, 16])
def test_smaller_damage_is_found_as_often_as_is_said(num_lines: int) -> None:
    expected = num_lines / STRATUM_LINES
    deviation = (expected * (1 - expected) / NUM_TRIES) ** 0.5
    assert found_ratio(num_lines) > expected - 4 * deviation
    if num_lines == 1:
        assert found_ratio(num_lines) < expected + 4 * deviation


def test_one_bit_of_a_line_that_is_looked_at_is_found() -> None:
    coverage = Coverage(11, 4)
    line = int(sampled_lines(coverage, NUM_LINES)[9])
    flipped = bytearray(BLOCK)
    flipped[line * LINE_BYTES + 63] ^= 1
    assert block_digest(flipped, coverage) != block_digest(BLOCK, coverage)
    assert block_digest(memoryview(BLOCK), coverage) == block_digest(BLOCK, coverage)


def test_the_same_line_of_blocks_in_a_row_is_found() -> None:
    seen = {int(sampled_lines(Coverage(5, place), NUM_LINES)[3]) for place in range(32)}
    assert seen == set(range(96, 128))


def test_bytes_after_the_last_line_are_always_looked_at() -> None:
    block = bytearray(100)
    before = block_digest(block, Coverage(1))
    block[99] ^= 1
    assert block_digest(block, Coverage(1)) != before


def test_a_flipped_bit_anywhere_in_a_descriptor_is_found() -> None:
    descriptor = kv_source_pb2.MemoryDescriptor(
        agent_metadata=random.Random(3).randbytes(300),
        base_address=0x7F0012345000,
        block_bytes=8192,
        num_blocks=512,
        memory_kind="DRAM",
        device_id=1,
    )
    want = descriptor_digest(descriptor)

    def check(**change: object) -> None:
        damaged = kv_source_pb2.MemoryDescriptor()
        damaged.CopyFrom(descriptor)
        for name, value in change.items():
            setattr(damaged, name, value)
        assert descriptor_digest(damaged) != want, change

    for index in range(len(descriptor.agent_metadata)):
        for bit in range(8):
            metadata = bytearray(descriptor.agent_metadata)
            metadata[index] ^= 1 << bit
            check(agent_metadata=bytes(metadata))
    for name, num_bits in (
        ("base_address", 64), ("block_bytes", 64), ("num_blocks", 64), ("device_id", 32)
    ):  # fmt: skip
        for bit in range(num_bits):
            check(**{name: getattr(descriptor, name) ^ (1 << bit)})
    for index in range(4):
        kind = bytearray(b"DRAM")
        kind[index] ^= 1
        check(memory_kind=kind.decode())
    check(agent_metadata=descriptor.agent_metadata + b"D", memory_kind="RAM")
    check(agent_metadata=descriptor.agent_metadata[:-1])


def test_a_descriptors_digest_covers_every_field() -> None:
    original = kv_source_pb2.MemoryDescriptor(agent_metadata=b"abc", memory_kind="DRAM")
    digests = {descriptor_digest(original)}
    fields = [f.name for f in original.DESCRIPTOR.fields if f.name != "digest"]
    for name in fields:
        changed = kv_source_pb2.MemoryDescriptor()
        changed.CopyFrom(original)
        if name == "ranks":
            changed.ranks.add(digest=b"x")
        else:
            old = getattr(changed, name)
            setattr(changed, name, old + {bytes: b"x", str: "x", int: 1}[type(old)])
        digests.add(descriptor_digest(changed))
    moved = kv_source_pb2.MemoryDescriptor(agent_metadata=b"abcD", memory_kind="RAM")
    digests.add(descriptor_digest(moved))
    assert len(digests) == len(fields) + 2


@pytest.mark.parametrize("seed", [0, 11])
@pytest.mark.parametrize("num_bytes", [0, 1, 64, 100, 4096, len(BLOCK) - 1])
def test_a_digest_of_a_part_is_that_of_its_bytes_alone(seed: int, num_bytes: int) -> None:
    other = BLOCK[:num_bytes] + bytes(len(BLOCK) - num_bytes)
    part = Coverage(seed, 3, num_bytes)
    want = block_digest(BLOCK[:num_bytes], Coverage(seed, 3))
    assert block_digest(BLOCK, part) == block_digest(other, part) == want
    if num_bytes:
        longer = block_digest(BLOCK, Coverage(seed, 3, num_bytes + 1))
        assert longer != want

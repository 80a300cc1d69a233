"""Block keys name content: equal exactly when everything up to the block's end is equal."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.block_hash import block_keys, extend_block_keys, prompt_digest, root_key

token_lists = st.lists(st.integers(0, 3), max_size=24)
sizes = st.integers(1, 5)


@given(a=token_lists, b=token_lists, size=sizes)
def test_equal_keys_mean_equal_prefixes(a: list[int], b: list[int], size: int) -> None:
    keys_a, keys_b = block_keys(a, size), block_keys(b, size)
    assert len(keys_a) == len(a) // size
    for index, (key_a, key_b) in enumerate(zip(keys_a, keys_b, strict=False)):
        end = (index + 1) * size
        assert (key_a == key_b) == (a[:end] == b[:end])


@given(tokens=token_lists, size=sizes, cuts=st.lists(st.integers(0, 24), max_size=4))
def test_extending_gives_the_same_keys(tokens: list[int], size: int, cuts: list[int]) -> None:
    keys: list[bytes] = []
    for cut in sorted(cuts):
        extend_block_keys(keys, tokens[:cut], size, b"tenant")
    extend_block_keys(keys, tokens, size, b"tenant")
    assert keys == block_keys(tokens, size, b"tenant")


def test_salts_and_adapters_never_meet() -> None:
    roots = [root_key(), root_key(b"a"), root_key(b"", b"a"), root_key(b"a", b"a"), root_key(b"aa")]
    assert len(set(roots)) == len(roots)
    assert set(block_keys(range(8), 4)).isdisjoint(block_keys(range(8), 4, b"salt"))


def test_keys_are_the_same_on_every_machine() -> None:
    """Router and workers compare them over the wire; a change needs a new root."""
    assert [key.hex() for key in block_keys([1, 2, 3, 2**32 - 1], 2, b"salt")] == [
        "7bfd2931f0db2e5ca25bb5c27a55ca35",
        "102e6bed7dd787982fc5664592583cc9",
    ]


def test_nobody_chooses_tokens_that_collide() -> None:
    """These two have one XXH3 of 128 bits, whatever the tenant's salt is: as many as one likes."""
    shared = list(range(12))
    first = [*shared, 2309737967, 19088743, 1987203136, 3587252754]
    second = [*shared, 1002161388, 287375654, 3294779715, 3318965843]
    for salt in (b"", b"tenant"):
        assert block_keys(first, 16, salt) != block_keys(second, 16, salt)
        assert prompt_digest(first, salt) != prompt_digest(second, salt)


def test_token_ids_are_unsigned_32_bit() -> None:
    with pytest.raises(struct.error):
        block_keys([-1], 1)
    with pytest.raises(struct.error):
        block_keys([2**32], 1)


def test_a_prompts_digest_tells_every_difference() -> None:
    """Also within the last, partial block, and of the salt."""
    prompts = [
        ([1, 2, 3], b""),
        ([1, 2, 4], b""),
        ([2, 1, 3], b""),
        ([1, 2], b""),
        ([1, 2, 3], b"x"),
    ]
    assert len({prompt_digest(ids, salt) for ids, salt in prompts}) == len(prompts)
    assert prompt_digest((1, 2, 3), b"x") == prompt_digest([1, 2, 3], b"x")

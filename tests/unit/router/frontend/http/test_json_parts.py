"""JSON in parts is the same as at once, and no part takes long."""

import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.frontend.http import json_parts
from router.frontend.http.json_parts import CHARACTERS_A_TURN, SmallItems, encode, pieces

CONTENTS = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text('a"\u2028é\U0001f600\n'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=2), inner),
)


@given(CONTENTS, st.integers(2, 8))
def test_parts_are_the_text_that_is_written_at_once(content: Any, num_at_once: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_NUM_AT_ONCE", "_A_VALUE", "_TEXT_AT_ONCE"):
            patch.setattr(json_parts, name, num_at_once)
        assert "".join(json_parts.json_parts(content)) == encode(content)


@pytest.mark.parametrize("character", ["a", "\n", "\u2028", "\U0001f600", "\x01"])
def test_a_long_text_is_written_in_slices(character: str) -> None:
    content = {"prompt": character * 1_000_000}
    parts = list(json_parts.json_parts(content))
    assert "".join(parts) == encode(content)
    assert max(map(len, parts)) < 7 * CHARACTERS_A_TURN


def test_what_is_small_is_one_part() -> None:
    entry = {"token": "a", "logprob": -1.0, "bytes": [97]}
    content = {"logprobs": {"content": [{**entry, "top_logprobs": [entry] * 20}]}}
    assert list(json_parts.json_parts(content)) == [encode(content)]
    assert len(list(json_parts.json_parts([content] * 100))) < 300


@pytest.mark.parametrize("kind", ["d", "f"])
def test_an_array_is_a_list_however_short_it_is(kind: str) -> None:
    for length in (0, 1, 5000):
        content = {"embedding": array(kind, [0.5] * length)}
        assert json.loads("".join(json_parts.json_parts(content))) == {"embedding": [0.5] * length}


@pytest.mark.parametrize("num_items", [0, 1, 7, 8, 9, 5000])
def test_small_items_are_written_some_at_a_time_and_none_is_looked_at(num_items: int) -> None:
    class Unseen(dict[str, object]):
        def values(self) -> Any:
            pytest.fail("it was looked at")

    items = SmallItems([Unseen(token="a", bytes=[97])] * num_items)
    parts = list(json_parts.json_parts({"content": items}))
    assert json.loads("".join(parts)) == {"content": [{"token": "a", "bytes": [97]}] * num_items}
    assert len(parts) <= 4 + num_items / 8


def test_pieces_have_all_parts_and_none_of_them_much_more_than_a_turn() -> None:
    parts = [f"{number}é" for number in range(40_000)]
    made = list(pieces(parts))
    assert b"".join(made) == "".join(parts).encode()
    sizes = [len(piece.decode()) for piece in made]
    assert all(CHARACTERS_A_TURN <= size < CHARACTERS_A_TURN + 9 for size in sizes[:-1])
    assert list(pieces(["", ""])) == []

"""The detokenizer against decoding everything at once, on arbitrary tokens."""

import operator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.errors import ConfigurationError
from diptych.text import detokenizer, stop_strings
from diptych.text.detokenizer import Detokenizer
from diptych.text.stop_strings import StopMatcher
from diptych.text.tokenizer import Tokenizer
from tests.text_models import byte_level_tokenizer, sentencepiece_tokenizer, write_folder
from tests.work_count import num_lines_run

_KINDS = ("byte-level", "sentencepiece", "sentencepiece-strip")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    made = (
        byte_level_tokenizer(),
        sentencepiece_tokenizer(),
        sentencepiece_tokenizer(strips_space=True),
    )
    return {
        kind: write_folder(tmp_path_factory.mktemp(kind), tokenizer)
        for kind, tokenizer in zip(_KINDS, made, strict=True)
    }


def run(
    tokenizer: Tokenizer,
    token_ids: list[int],
    stop: list[str],
    cuts: list[int],
    min_tokens: int = 0,
) -> tuple[str, str | None, int]:
    """Push in pieces. Returns text, stop string and number of tokens used."""
    pushed = Detokenizer(tokenizer, stop, min_tokens)
    text, used, at = "", 0, 0
    for cut in [*sorted(cuts), len(token_ids)]:
        delta = pushed.push(token_ids[at:cut])
        text, used, at = text + delta.text, used + delta.num_tokens_used, max(at, cut)
        if delta.stop_match is not None:
            return text, delta.stop_match, used
    last = pushed.flush()
    return text + last.text, last.stop_match, used


@pytest.mark.parametrize("kind", _KINDS)
def test_of_ids_that_the_vocabulary_lacks_nothing_is_kept(
    kind: str, tokenizers: dict[str, Tokenizer]
) -> None:
    pieces = tokenizers[kind].text
    unknown = range(10**6, 10**6 + 9)
    assert {pieces.piece(token_id) for token_id in unknown} == {""}
    assert {pieces.whole(token_id) for token_id in unknown} == {""}
    known = pieces.whole(5)
    assert not {*pieces._pieces, *pieces._whole} & {*unknown}
    assert pieces._whole[5] == known


@pytest.mark.parametrize("num_before", [1, 2 * detokenizer.BULK_TOKENS])
def test_of_stops_that_end_together_the_longest_counts(
    tokenizers: dict[str, Tokenizer], num_before: int
) -> None:
    """Pushed one by one, and all at once."""
    tokenizer = tokenizers["byte-level"]
    ids = tokenizer.encode("x" * num_before + "abc", add_special=False)
    for stop in (["b", "ab"], ["ab", "b"]):
        assert run(tokenizer, ids, stop, [])[:2] == ("x" * num_before, "ab")


@pytest.mark.parametrize("is_at_once", [False, True])
def test_the_token_that_is_the_first_to_count_does(
    tokenizers: dict[str, Tokenizer], *, is_at_once: bool
) -> None:
    tokenizer = tokenizers["byte-level"]
    end = tokenizer.encode("!", add_special=False)
    before = tokenizer.encode("x" * 2 * detokenizer.BULK_TOKENS, add_special=False)
    ids, num_enough = [*before, *end, *before], len(before) + len(end)
    cuts = [] if is_at_once else list(range(1, len(ids)))
    assert run(tokenizer, ids, ["!"], cuts, num_enough)[1:] == ("!", num_enough)
    assert run(tokenizer, ids, ["!"], cuts, num_enough + 1)[1] is None


def first_stop(text: str, stop: list[str]) -> tuple[str, str | None]:
    """What precedes the stop string that ends first (of those, the longest)."""
    for end in range(1, len(text) + 1):
        for candidate in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(candidate):
                return text[: end - len(candidate)], candidate
    return text, None


# Bytes are frequent, so that characters break in every way; 700 is out of every vocabulary.
token_lists = st.lists(
    st.one_of(st.integers(0, 420), st.integers(3, 258), st.sampled_from([0, 1, 2, 700])),
    max_size=40,
)
cut_lists = st.lists(st.integers(0, 40), max_size=6)


@pytest.mark.parametrize("kind", _KINDS)
@given(token_ids=token_lists, cuts=cut_lists)
def test_deltas_joined_are_the_whole_text(
    tokenizers: dict[str, Tokenizer], kind: str, token_ids: list[int], cuts: list[int]
) -> None:
    tokenizer = tokenizers[kind]
    cuts = [min(cut, len(token_ids)) for cut in cuts]
    text, stop_match, used = run(tokenizer, token_ids, [], cuts)
    # Continuing a prompt, an output keeps the space that decoding it alone would drop.
    plain = tokenizers["sentencepiece"] if kind == "sentencepiece-strip" else tokenizer
    assert text == plain.decode(token_ids)
    assert stop_match is None
    assert used == len(token_ids)


@pytest.mark.parametrize("kind", _KINDS[:2])
@given(text=st.text(max_size=30), cuts=cut_lists)
def test_text_survives_a_round_trip(
    tokenizers: dict[str, Tokenizer], kind: str, text: str, cuts: list[int]
) -> None:
    tokenizer = tokenizers[kind]
    if kind == "sentencepiece":
        text = text.replace("▁", " ")  # the symbol is a space
    token_ids = tokenizer.encode(text, add_special=False)
    cuts = [min(cut, len(token_ids)) for cut in cuts]
    assert run(tokenizer, token_ids, [], cuts)[0] == text


@given(
    text=st.text("ab€ ", max_size=30),
    stop=st.lists(st.text("ab€ ", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=cut_lists,
)
def test_the_stop_string_that_ends_first_wins(
    tokenizers: dict[str, Tokenizer], text: str, stop: list[str], cuts: list[int]
) -> None:
    tokenizer = tokenizers["byte-level"]
    token_ids = tokenizer.encode(text, add_special=False)
    cuts = [min(cut, len(token_ids)) for cut in cuts]
    got, stop_match, used = run(tokenizer, token_ids, stop, cuts)
    assert (got, stop_match) == first_stop(text, stop)
    if stop_match is not None:  # and no token more was used than it takes
        assert first_stop(tokenizer.decode(token_ids[:used]), stop)[1] == stop_match
        assert first_stop(tokenizer.decode(token_ids[: used - 1]), stop)[1] is None


@given(text=st.text("ab ", max_size=20), stop=st.text("ab ", min_size=1, max_size=3))
def test_what_was_emitted_never_has_to_be_taken_back(
    tokenizers: dict[str, Tokenizer], text: str, stop: str
) -> None:
    pushed = Detokenizer(tokenizers["byte-level"], [stop])
    emitted = ""
    for token_id in tokenizers["byte-level"].encode(text, add_special=False):
        delta = pushed.push([token_id])
        emitted += delta.text
        assert stop not in emitted
        assert text.startswith(emitted)
        if delta.stop_match is not None:
            return
    assert emitted + pushed.flush().text == text


@pytest.mark.parametrize("kind", _KINDS[:2])
@given(
    text=st.text("ab€ ", max_size=30),
    stop=st.lists(st.text("ab€ ", min_size=1, max_size=5), min_size=1, max_size=4),
    cuts=cut_lists,
    min_tokens=st.integers(0, 40),
)
def test_many_tokens_at_once_are_as_each_alone(
    tokenizers: dict[str, Tokenizer],
    kind: str,
    text: str,
    stop: list[str],
    cuts: list[int],
    min_tokens: int,
) -> None:
    tokenizer = tokenizers[kind]
    token_ids = tokenizer.encode(text, add_special=False)
    cuts = sorted(min(cut, len(token_ids)) for cut in cuts)
    alone, many = (Detokenizer(tokenizer, stop, min_tokens) for _ in range(2))
    for begin, end in pairwise([0, *cuts, len(token_ids)]):
        expected = alone.push(token_ids[begin:end])  # fewer than BULK_TOKENS
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(detokenizer, "BULK_TOKENS", 1)
            assert many.push(token_ids[begin:end]) == expected
        if expected.stop_match is not None:
            return
    assert many.flush() == alone.flush()


def test_a_long_output_costs_the_matcher_what_a_short_one_does(
    tokenizers: dict[str, Tokenizer],
) -> None:
    tokenizer = tokenizers["byte-level"]
    stop = [f"{letter}bababa{number}" for letter in "ab" for number in range(8)]

    def num_lines(num_repeats: int) -> int:
        token_ids = ids_of(tokenizer, "ab " * num_repeats)
        assert len(token_ids) >= detokenizer.BULK_TOKENS
        pushed = Detokenizer(tokenizer, stop)
        return num_lines_run(stop_strings, lambda: pushed.push(token_ids))

    assert num_lines(200) == num_lines(2000) > 0


def ids_of(tokenizer: Tokenizer, *texts: str) -> list[int]:
    return [token for text in texts for token in tokenizer.encode(text, add_special=False)]


def test_stop_strings_do_not_count_before_min_tokens(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte-level"]
    token_ids = ids_of(tokenizer, "x", "|", "y", "|", "z")
    assert len(token_ids) == 5
    assert run(tokenizer, token_ids, ["|"], []) == ("x", "|", 2)
    assert run(tokenizer, token_ids, ["|"], [], min_tokens=2) == ("x", "|", 2)
    assert run(tokenizer, token_ids, ["|"], [], min_tokens=3) == ("x|y", "|", 4)
    assert run(tokenizer, token_ids, ["|"], [], min_tokens=5) == ("x|y|z", None, 5)
    # One that began before is completed by the token that may.
    assert run(tokenizer, token_ids, ["|y|"], [], min_tokens=4) == ("x", "|y|", 4)


def test_a_stop_string_at_the_first_token_leaves_no_text(
    tokenizers: dict[str, Tokenizer],
) -> None:
    pushed = Detokenizer(tokenizers["byte-level"], ["H"])
    assert pushed.push(ids_of(tokenizers["byte-level"], "Hello")) == ("", "H", 1)


def test_a_broken_character_ends_as_replacement(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte-level"]
    pushed = Detokenizer(tokenizer)
    euro = ids_of(tokenizer, "€")
    assert pushed.push(euro[:2]).text == ""
    assert pushed.flush().text == "\ufffd"


def test_a_byte_run_may_complete_a_stop_string_at_the_end(
    tokenizers: dict[str, Tokenizer],
) -> None:
    tokenizer = tokenizers["sentencepiece"]
    pushed = Detokenizer(tokenizer, ["€"])
    assert pushed.push(ids_of(tokenizer, "a€")).text == "a"
    assert pushed.flush() == ("", "€", 0)


def test_special_tokens_have_no_text(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte-level"]
    [bos] = ids_of(tokenizer, "<s>")
    assert Detokenizer(tokenizer).push([bos, *ids_of(tokenizer, "a"), bos]).text == "a"


def test_an_empty_stop_string_is_refused(tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(ValueError, match="empty"):
        Detokenizer(tokenizers["byte-level"], ["a", ""])


def test_an_unknown_decoder_is_refused_by_name(tmp_path: Path) -> None:
    from tokenizers import decoders

    tokenizer = byte_level_tokenizer()
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ConfigurationError, match="WordPiece"):
        write_folder(tmp_path, tokenizer)


def test_a_piece_of_whole_characters_is_decoded_once(tokenizers: dict[str, Tokenizer]) -> None:
    """Within a character it is not: what was begun is broken then."""
    text = tokenizers["byte-level"].text
    letter, begun = 70, ids_of(tokenizers["byte-level"], "😀")[0]
    whole = text.whole(letter)
    assert whole is not None
    assert text.whole(letter) is whole
    assert text.whole(begun) is None
    assembler = text.assembler()
    assert assembler.push(letter) is whole
    assert [assembler.push(begun), assembler.push(letter)] == ["", f"\ufffd{whole}"]
    assert assembler.push(letter) is whole


def test_choices_with_the_same_stop_strings_share_what_finding_them_takes() -> None:
    stop = ["ab" * 500, "ba" * 500]
    first, second = (StopMatcher(stop) for _ in range(2))
    assert all(map(operator.is_, first._tables, second._tables))

"""Where tokens begin in a completion's text, if some are no whole characters."""

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from diptych.text.token_text import TokenText
from diptych.token_logprobs import TokenLogprobs
from router.frontend.http.logprob_form import CompletionLogprobs

PIECES = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "b", "c")


def text_of_sentencepiece() -> TokenText:
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in PIECES], 0, True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return TokenText(tokenizer)


# The bytes of a character, as letters; one that begins as its second byte, but goes on otherwise.
LETTERS = ("<s>", "ã", "£", "®", "£c", "Ġa", "b", "c")


def text_of_byte_level() -> TokenText:
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(LETTERS)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    return TokenText(tokenizer)


EURO = ("<0xE2>", "<0x82>", "<0xAC>")


@pytest.mark.parametrize(
    ("pieces", "text", "offsets"),
    [
        ((*EURO, "b", "c"), "€bc", [0, 0, 0, 1, 2]),
        (("▁a", *EURO, *EURO, "b"), " a€€b", [0, 2, 2, 2, 2, 2, 2, 4]),
        (("b", "<0xE2>", "c"), "b\ufffdc", [0, 1, 2]),
        (("b", *EURO), "b€", [0, 1, 1, 1]),
    ],
)
@pytest.mark.parametrize("num_at_once", [1, 9])
def test_a_token_behind_bytes_begins_behind_their_text(
    pieces: tuple[str, ...], text: str, offsets: list[int], num_at_once: int
) -> None:
    ids = [PIECES.index(piece) for piece in pieces]
    check_offsets(text_of_sentencepiece(), ids, text, offsets, num_at_once)


@pytest.mark.parametrize(
    ("pieces", "text", "offsets"),
    [
        (("ã", "£", "®", "b"), "㣮b", [0, 0, 0, 1]),
        (("b", "ã", "c", "b"), "b\ufffdcb", [0, 1, 2, 3]),
        (("ã", "£", "Ġa", "c"), "\ufffd ac", [0, 0, 1, 3]),
        (("ã", "ã", "£", "®"), "\ufffd㣮", [0, 1, 1, 1]),
        (("ã", "£c", "b"), "\ufffdcb", [0, 0, 2]),
        (("b", "ã", "<s>", "c"), "b\ufffdc", [0, 1, 1, 2]),
        (("ã", "£"), "\ufffd", [0, 0]),
    ],
)
@pytest.mark.parametrize("num_at_once", [1, 9])
def test_a_token_behind_half_a_character_begins_behind_it(
    pieces: tuple[str, ...], text: str, offsets: list[int], num_at_once: int
) -> None:
    ids = [LETTERS.index(piece) for piece in pieces]
    check_offsets(text_of_byte_level(), ids, text, offsets, num_at_once)


def check_offsets(
    tokens: TokenText, ids: list[int], text: str, offsets: list[int], num_at_once: int
) -> None:
    assembler = tokens.assembler()
    assert "".join(map(assembler.push, ids)) + assembler.flush() == text
    written = CompletionLogprobs(tokens)
    found: list[int] = []
    for at in range(0, len(ids), num_at_once):
        some = ids[at : at + num_at_once]
        written.add(some, [TokenLogprobs(-1.0, (), ())] * len(some))
        taken: Any = written.take()
        found += taken["text_offset"]
    assert found == offsets

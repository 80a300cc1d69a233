"""Where tokens begin in a completion's text, if some are single bytes."""

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


def ids_of(*pieces: str) -> list[int]:
    return [PIECES.index(piece) for piece in pieces]


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
    tokens, ids = text_of_sentencepiece(), ids_of(*pieces)
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

"""What is resumed of an answer that is taken apart: work for its text, and no other state."""

from collections.abc import Sequence
from itertools import count, pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given

from diptych.finish_reason import FinishReason
from diptych.text import detokenizer
from diptych.text.detokenizer import Detokenizer, TextDelta
from diptych.text.mark import Mark
from diptych.text.response.families import family
from diptych.text.response.parser import Parsed, ResponseParser
from diptych.text.response.patience import Patience
from diptych.text.response.thoughts import AnswerParser, ThoughtSplit
from diptych.text.thought_form import ThoughtForm
from diptych.text.tokenizer import Tokenizer
from router.generation.answer import ChoiceFinished, Delta
from router.request.answer_split import AnswerSplit
from router.request.emitted_tokens import RequestShape
from router.request.response_builder import ResponseBuilder

PIECE = 1024  # characters that a parser looks through at once
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
WORDS = ["<think>", "</think>", CALL, CALL[:-13], "<", "a", "bc", "ü", " ", "\n", "two"]
FORM = ThoughtForm(open=Mark.of("<think>", {}), close=Mark.of("</think>", {}))


def built(
    push: Detokenizer, parser: AnswerParser, num_resumed: int, max_tokens: int = 200
) -> ResponseBuilder:
    ids = count()
    return ResponseBuilder(
        RequestShape(prompt_ids=(1,), max_tokens=max_tokens),
        push,
        received_s=9.0,
        clock=lambda: 10.0,
        max_unsent=999,
        num_resumed=num_resumed,
        split=AnswerSplit(parser, lambda name: f"{name}{next(ids)}"),
    )


class CountingDetokenizer(Detokenizer):
    num_pushes = 0

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        self.num_pushes += 1
        return super().push(token_ids)


class CountingPatience(Patience):
    num_pieces = 0

    def begin_piece(self) -> None:
        self.num_pieces += 1
        super().begin_piece()


class CountingParser(ResponseParser):
    num_feeds = 0

    def feed(self, text: str) -> Parsed:
        self.num_feeds += 1
        return super().feed(text)


@pytest.mark.parametrize("num_tokens", [100, 5000])
def test_what_is_resumed_is_taken_apart_at_once(tokenizer: Tokenizer, num_tokens: int) -> None:
    """On the event loop: free time is given for pieces of its text, not for each of its tokens."""
    push = CountingDetokenizer(tokenizer, [f"{number} never said" for number in range(16)])
    patience = CountingPatience()
    parser = CountingParser(family("hermes"), "", {"f": {}}, patience)
    answer = built(push, parser, num_tokens, max_tokens=num_tokens + 1)
    letter, *_ = tokenizer.encode("a", add_special=False)
    assert not answer.sink([letter] * num_tokens, (), ())
    assert (push.num_pushes, parser.num_feeds) == (1, 1)
    assert patience.num_pieces == -(-num_tokens // PIECE)
    assert not answer.is_due
    answer.sink([letter], (), ())
    assert answer.take() == Delta("a", [letter], num_tokens, [])


def parser_of(kind: str) -> AnswerParser:
    calls = ResponseParser(family("hermes"), "", {"f": {}})
    return ThoughtSplit(FORM, calls) if kind == "form" else calls


class Outcome:
    """What became of an answer whose tokens came in these pieces."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        kind: str,
        token_ids: list[int],
        cuts: list[int],
        num_resumed: int,
    ) -> None:
        push = Detokenizer(tokenizer, ["two", "c\n"], min_tokens=2)
        answer = built(push, parser_of(kind), num_resumed)
        self.sent: list[Delta] = []
        self.has_ended = False
        for begin, end in pairwise(cuts):
            self.has_ended = answer.sink(token_ids[begin:end], (), ())
            while (delta := answer.take()) is not None:
                self.sent.append(delta)
            if self.has_ended:
                break
        self.num_tokens = answer.num_output_tokens
        self.end: tuple[Delta | None, ChoiceFinished] = answer.finish(FinishReason.STOP)


@pytest.mark.parametrize("kind", ["calls", "form"])
@given(
    text=st.lists(st.sampled_from(WORDS), max_size=12).map("".join),
    cuts=st.lists(st.integers(1, 199), max_size=8),
    share=st.floats(0.0, 1.0),
    is_bulk=st.booleans(),
)
def test_what_follows_is_as_if_each_token_had_come_alone(
    tokenizer: Tokenizer, kind: str, text: str, cuts: list[int], share: float, is_bulk: bool
) -> None:
    """Nothing is lost or said again, and tokens stay where they are."""
    ids = tokenizer.encode(text, add_special=False)[:200]
    num_resumed = int(share * len(ids))
    each = list(range(len(ids) + 1))
    unbroken = Outcome(tokenizer, kind, ids, each, 0)
    behind = each[num_resumed:]
    some = sorted({num_resumed, len(ids), *(cut for cut in cuts if num_resumed < cut < len(ids))})
    with pytest.MonkeyPatch.context() as patch:
        if is_bulk:
            patch.setattr(detokenizer, "BULK_TOKENS", 1)
        resumed = Outcome(tokenizer, kind, ids, sorted({0, *behind}), num_resumed)
        at_once = Outcome(tokenizer, kind, ids, sorted({0, *some}), num_resumed)
    singly = Outcome(tokenizer, kind, ids, sorted({*range(num_resumed), *some}), num_resumed)
    assert resumed.sent == [delta for delta in unbroken.sent if delta.position >= num_resumed]
    assert at_once.sent == singly.sent
    for outcome in (resumed, at_once, singly):
        assert outcome.num_tokens == unbroken.num_tokens
        assert outcome.has_ended == unbroken.has_ended
        assert outcome.end == unbroken.end

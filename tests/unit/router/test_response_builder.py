"""Emitted tokens become responses: text, positions, stop strings, timing."""

from pathlib import Path

import pytest

from diptych.text.detokenizer import Detokenizer
from diptych.text.tokenizer import Tokenizer
from diptych.v1 import common_pb2, inference_pb2
from router.request.emitted_tokens import EmittedTokens, RequestShape
from router.request.response_builder import Answer
from tests.text_models import byte_level_tokenizer, write_folder

PROMPT = (1, 2, 3)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("byte-level")
    return write_folder(folder, byte_level_tokenizer())


class Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


def make(
    tokenizer: Tokenizer,
    stop: tuple[str, ...] = (),
    stop_token_ids: frozenset[int] = frozenset(),
    max_unsent: int = 3,
    min_tokens: int = 0,
) -> tuple[Answer, EmittedTokens, Clock]:
    clock = Clock()
    shape = RequestShape(
        prompt_ids=PROMPT, max_tokens=50, stop_token_ids=stop_token_ids, min_tokens=min_tokens
    )
    answer = Answer(
        "r",
        shape,
        Detokenizer(tokenizer, stop, min_tokens),
        received_s=9.0,
        clock=clock,
        max_unsent=max_unsent,
    )
    return answer, EmittedTokens(shape, answer.sink), clock


def feed(output: EmittedTokens, token_ids: list[int]) -> None:
    assert output.accept(output.num_sequence_tokens, token_ids, ())


def test_what_is_not_taken_in_time_is_joined(tokenizer: Tokenizer) -> None:
    answer, output, _ = make(tokenizer)
    ids = tokenizer.encode("one two three", add_special=False)
    for token_id in ids[:2]:
        feed(output, [token_id])
    first = answer.take()
    assert first is not None
    assert (first.position, list(first.token_ids)) == (0, ids[:2])
    feed(output, ids[2:])
    second = answer.take()
    assert second is not None
    assert second.position == 2
    assert answer.take() is None
    assert first.text + second.text + answer.flush() == "one two three"


def test_too_much_unsent_is_overfull(tokenizer: Tokenizer) -> None:
    answer, output, _ = make(tokenizer, max_unsent=2)
    for token_id in (70, 71, 72):
        assert not answer.is_overfull
        feed(output, [token_id])
    assert answer.is_overfull
    answer.take()
    assert not answer.is_overfull


def test_stop_string_within_a_batch_cuts_the_tokens_too(tokenizer: Tokenizer) -> None:
    answer, output, _ = make(tokenizer, stop=("two",))
    ids = [t for c in "one two three" for t in tokenizer.encode(c, add_special=False)]
    feed(output, ids)
    response = answer.take()
    assert response is not None
    assert response.text == "one "
    assert len(response.token_ids) == len("one two")
    assert answer.num_output_tokens == len("one two")
    assert (answer.stop_match, answer.flush()) == ("two", "")
    assert output.stop_matched
    assert output.complete_reason == common_pb2.FINISH_REASON_STOP


def test_broken_characters_at_the_end_may_complete_a_stop_string(tokenizer: Tokenizer) -> None:
    answer, output, _ = make(tokenizer, stop=("e\ufffd",))
    first_byte, _ = tokenizer.encode("ü", add_special=False)
    feed(output, [*tokenizer.encode("one", add_special=False), first_byte])
    response = answer.take()
    assert response is not None
    assert response.text + answer.flush() == "on"
    assert answer.stop_match == "e\ufffd"


def test_stop_token_has_no_text(tokenizer: Tokenizer) -> None:
    (letter,) = tokenizer.encode("x", add_special=False)
    answer, output, _ = make(tokenizer, stop_token_ids=frozenset({letter}), min_tokens=2)
    feed(output, [letter])
    feed(output, [letter])
    response = answer.take()
    assert response is not None
    assert list(response.token_ids) == [letter, letter]
    assert response.text + answer.flush() == "x", "before min_tokens it is a token like others"


def test_stages_tile_the_time_to_first_token(tokenizer: Tokenizer) -> None:
    answer, output, clock = make(tokenizer)
    answer.placed()
    clock.now = 10.5
    answer.placed()
    feed(output, [70])
    clock.now = 10.75
    assert answer.written(1) is None
    clock.now = 11.75
    assert answer.written(2) == 1.0
    clock.now = 13.75
    answer.written(1)
    timing = answer.timing()
    assert (timing.queue_s, timing.prefill_s, timing.first_write_s) == (1.0, 0.5, 0.25)
    assert timing.ttft_s == 1.75
    assert (timing.handoff_gap_s, timing.decode_s) == (1.0, 2.0)
    assert timing.total_s == 4.75


def test_last_response_carries_the_rest(tokenizer: Tokenizer) -> None:
    answer, output, _ = make(tokenizer)
    feed(output, [70])
    last = answer.last_response(
        common_pb2.FINISH_REASON_LENGTH, "!", inference_pb2.Usage(), answer.timing()
    )
    assert last.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert (last.position, last.text, list(last.token_ids)) == (1, "!", [])

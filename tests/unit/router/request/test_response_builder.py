"""Emitted tokens become responses: text, positions, stop strings, timing."""

import pytest

from diptych.errors import InvalidRequestError
from diptych.finish_reason import FinishReason
from diptych.text.detokenizer import Detokenizer
from diptych.text.response.families import family
from diptych.text.response.parser import ResponseParser
from diptych.text.response.template import ResponseTemplate
from diptych.text.tokenizer import Tokenizer
from diptych.token_logprobs import TokenLogprobs
from diptych.v1 import common_pb2
from router.generation.answer import CalledTool, ChoiceFinished, Delta
from router.request.answer_split import AnswerSplit
from router.request.emitted_tokens import EmittedTokens, RequestShape
from router.request.response_builder import OnEmitted, ResponseBuilder

PROMPT = (1, 2, 3)


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
    num_resumed: int = 0,
    interval: int = 1,
    includes_stop: bool = False,
    on_emitted: OnEmitted = lambda num_tokens, gap_s: None,
    split: AnswerSplit | None = None,
) -> tuple[ResponseBuilder, EmittedTokens, Clock]:
    clock = Clock()
    shape = RequestShape(
        prompt_ids=PROMPT, max_tokens=200, stop_token_ids=stop_token_ids, min_tokens=min_tokens
    )
    answer = ResponseBuilder(
        shape,
        Detokenizer(tokenizer, stop, min_tokens),
        received_s=9.0,
        clock=clock,
        max_unsent=max_unsent,
        num_resumed=num_resumed,
        interval=interval,
        includes_stop=includes_stop,
        on_emitted=on_emitted,
        split=split,
    )
    return answer, EmittedTokens(shape, answer.sink), clock


def rest(answer: ResponseBuilder, reason: FinishReason = FinishReason.LENGTH) -> str:
    """The text that only the end sets free."""
    delta, _ = answer.finish(reason)
    return "" if delta is None else delta.text


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
    assert first.text + second.text + rest(answer) == "one two three"


@pytest.mark.parametrize("num_resumed", [0, 2])
def test_all_but_the_first_token_wait_for_others(tokenizer: Tokenizer, num_resumed: int) -> None:
    answer, output, _ = make(tokenizer, interval=3, num_resumed=num_resumed)
    if num_resumed:
        feed(output, [70, 71])
        assert not answer.is_due
    taken = []
    for token_id in range(72, 80):
        feed(output, [token_id])
        if answer.is_due:
            delta = answer.take()
            assert delta is not None
            taken.append(delta)
    rest = answer.take()
    assert rest is not None, "the end waits for nothing"
    sent = [*taken, rest]
    assert [each.token_ids for each in sent] == [[72], [73, 74, 75], [76, 77, 78], [79]]
    assert [each.position - num_resumed for each in sent] == [0, 1, 4, 7]
    assert "".join(each.text for each in sent) == tokenizer.decode(list(range(72, 80)))


def test_what_is_not_due_yet_is_not_left_unread(tokenizer: Tokenizer) -> None:
    answer, output, _ = make(tokenizer, interval=5, max_unsent=2)
    feed(output, [70])
    answer.take()
    for token_id in range(71, 75):
        feed(output, [token_id])
    assert not answer.is_due
    for _ in range(2):
        feed(output, [75])
        assert not answer.is_overfull
    feed(output, [75])
    assert answer.is_overfull


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
    assert answer.finish(FinishReason.STOP) == (None, ChoiceFinished(FinishReason.STOP, "two"))
    assert output.stop_matched
    assert output.complete_reason == common_pb2.FINISH_REASON_STOP


@pytest.mark.parametrize("cut", [3, 5, 6, 7])
def test_a_stop_string_may_be_part_of_the_text(tokenizer: Tokenizer, cut: int) -> None:
    answer, output, _ = make(tokenizer, stop=("two",), includes_stop=True)
    ids = [t for c in "one two three" for t in tokenizer.encode(c, add_special=False)]
    feed(output, ids[:cut])
    if not output.stop_matched:
        feed(output, ids[cut:])
    response = answer.take()
    assert response is not None
    assert response.text == "one two"
    assert answer.finish(FinishReason.STOP) == (None, ChoiceFinished(FinishReason.STOP, "two"))


def test_a_stop_token_may_be_part_of_the_text(tokenizer: Tokenizer) -> None:
    first, last = tokenizer.encode("a", add_special=False) + tokenizer.encode(
        "b", add_special=False
    )
    for includes_stop, text in ((True, "ab"), (False, "a")):
        stops = frozenset({last})
        answer, output, _ = make(tokenizer, stop_token_ids=stops, includes_stop=includes_stop)
        feed(output, [first, last])
        response = answer.take()
        assert response is not None
        assert response.text == text
        assert answer.finish(FinishReason.STOP) == (None, ChoiceFinished(FinishReason.STOP, last))


def test_broken_characters_that_stop_may_be_part_of_the_text(tokenizer: Tokenizer) -> None:
    answer, output, _ = make(tokenizer, stop=("e\ufffd",), includes_stop=True)
    first_byte, _ = tokenizer.encode("ü", add_special=False)
    feed(output, [*tokenizer.encode("e", add_special=False), first_byte])
    taken = answer.take()
    assert taken is not None
    delta, finished = answer.finish(FinishReason.LENGTH)
    assert delta is not None
    assert taken.text + delta.text == "e\ufffd"
    assert finished == ChoiceFinished(FinishReason.STOP, "e\ufffd")


def make_split(max_calls: int | None = None) -> AnswerSplit:
    ids = iter("abc")
    parser = ResponseParser(family("hermes"), "", {"f": {}})
    return AnswerSplit(parser, lambda _: next(ids), max_calls)


CALLED = '<think>r</think>t<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize("num_resumed", [0, 20])
def test_detail_5_an_answer_with_calls_ends_with_that_reason(
    tokenizer: Tokenizer, num_resumed: int
) -> None:
    """Also one that is resumed: what came before was said before."""
    answer, output, _ = make(tokenizer, split=make_split(), num_resumed=num_resumed)
    ids = [t for c in CALLED for t in tokenizer.encode(c, add_special=False)]
    feed(output, ids[:20])
    before = answer.take()
    feed(output, ids[20:])
    delta = answer.take()
    assert delta is not None
    assert delta.tool_calls == (CalledTool("a", "f", "{}"),)
    said = delta.said if before is None else before.said.followed_by(delta.said)
    assert said[:2] == (("", "") if num_resumed else ("t", "r"))
    ended = ChoiceFinished(FinishReason.TOOL_CALLS, ids[-1])
    assert answer.finish(FinishReason.STOP) == (None, ended)


def test_detail_6_a_truncated_call_is_length(tokenizer: Tokenizer) -> None:
    answer, output, _ = make(tokenizer, split=make_split())
    feed(output, [t for c in CALLED[:-3] for t in tokenizer.encode(c, add_special=False)])
    assert answer.finish(FinishReason.LENGTH) == (None, ChoiceFinished(FinishReason.LENGTH))


def test_detail_6_a_call_that_a_stop_string_cut_off_is_none(tokenizer: Tokenizer) -> None:
    """Not what was written of it by then: half a file, say."""
    parser = ResponseParser(family("qwen-xml"), "", {"f": {}})
    split = AnswerSplit(parser, lambda _: "a")
    answer, output, _ = make(tokenizer, stop=("\n\n",), split=split)
    called = "<tool_call>\n<function=f>\n<parameter=x>\none\n\ntwo"
    feed(output, [t for c in called for t in tokenizer.encode(c, add_special=False)])
    rest, finished = answer.finish(FinishReason.STOP)
    assert finished == ChoiceFinished(FinishReason.STOP, "\n\n")
    assert rest is None or not rest.tool_calls


def test_a_call_has_the_id_that_the_model_wrote_once() -> None:
    """Its chat template shows it that id again."""
    ids = iter("abc")
    split = AnswerSplit(ResponseParser(family("kimi-k2"), "", {"f": {}}), lambda _: next(ids))
    call = "<|tool_call_begin|>functions.f:{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    said = split.add("".join(call.format(number) for number in (0, 1, 1)))
    assert [each.call_id for each in said.tool_calls] == ["functions.f:0", "functions.f:1", "c"]


def test_of_calls_that_may_not_be_parallel_the_first_counts(tokenizer: Tokenizer) -> None:
    answer, output, _ = make(tokenizer, split=make_split(max_calls=1))
    twice = CALLED[17:] * 2
    for token_id in (t for c in twice for t in tokenizer.encode(c, add_special=False)):
        feed(output, [token_id])
    delta = answer.take()
    assert delta is not None
    rest, _ = answer.finish(FinishReason.STOP)
    assert [call.call_id for call in delta.tool_calls] == ["a"]
    assert rest is None or not rest.tool_calls


def thinking_parser() -> ResponseParser:
    return ResponseParser(family("think"), "", {})


def logprobs_of(token_ids: list[int]) -> list[TokenLogprobs]:
    """Which tell their tokens apart."""
    return [TokenLogprobs(-float(token_id), (token_id,), (-0.5,)) for token_id in token_ids]


@pytest.mark.parametrize("size", [1, 3, 100])
def test_thoughts_do_not_join_with_what_follows(tokenizer: Tokenizer, size: int) -> None:
    """So that log probabilities are those of what is said, however many tokens came at once."""
    answer, output, _ = make(tokenizer, split=AnswerSplit(thinking_parser(), str))
    said = "<think>ab</think>cd"
    ids = [t for c in said for t in tokenizer.encode(c, add_special=False)]
    for at in range(0, len(ids), size):
        some = ids[at : at + size]
        assert output.accept(len(PROMPT) + at, some, (), logprobs_of(some))
    assert answer.is_due
    thought = answer.take()
    assert answer.is_due
    text = answer.take()
    assert not answer.is_due
    assert answer.take() is None
    assert thought is not None
    assert text is not None
    assert (thought.reasoning, thought.text, thought.position) == ("ab", "", 0)
    assert (text.reasoning, text.text, text.position) == ("", "cd", len(ids) - 2)
    for delta in (thought, text):
        assert delta.logprobs == tuple(logprobs_of(delta.token_ids))
    assert thought.token_ids + text.token_ids == ids


def test_thoughts_are_due_though_what_follows_is_not(tokenizer: Tokenizer) -> None:
    interval, text = 16, "cdefghijklmnopqr"
    split = AnswerSplit(thinking_parser(), str)
    answer, output, _ = make(tokenizer, split=split, interval=interval)
    before, thoughts, after = (
        [t for c in part for t in tokenizer.encode(c, add_special=False)]
        for part in ("<think>", "ab</think>", text)
    )
    feed(output, before)
    assert answer.take() is not None
    feed(output, thoughts)
    assert not answer.is_due
    feed(output, after[:1])
    assert answer.is_due
    thought = answer.take()
    assert thought is not None
    assert (thought.reasoning, thought.token_ids) == ("ab", thoughts)
    for token_id in after[1:]:
        assert not answer.is_due
        feed(output, [token_id])
    assert answer.is_due
    rest = answer.take()
    assert rest is not None
    assert (rest.text, rest.token_ids) == (text, after)
    assert not answer.is_due


def test_thoughts_do_not_join_with_a_call_that_follows_at_once(tokenizer: Tokenizer) -> None:
    answer, output, _ = make(tokenizer, split=make_split())
    said = '<think>a</think><tool_call>{"name": "f", "arguments": {}}</tool_call>'
    ids = [t for c in said for t in tokenizer.encode(c, add_special=False)]
    feed(output, ids)
    thought, call = answer.take(), answer.take()
    assert thought is not None
    assert call is not None
    assert (thought.reasoning, thought.tool_calls) == ("a", ())
    assert (call.reasoning, call.tool_calls) == ("", (CalledTool("a", "f", "{}"),))
    assert thought.token_ids + call.token_ids == ids
    assert answer.take() is None


def test_log_probabilities_go_with_their_tokens(tokenizer: Tokenizer) -> None:
    """What was sent before and comes again after a fail-over, and what a stop string cuts off."""
    answer, output, _ = make(tokenizer, stop=("two",))
    ids = [t for c in "one two three" for t in tokenizer.encode(c, add_special=False)]
    assert output.accept(len(PROMPT), ids[:2], (), logprobs_of(ids[:2]))
    assert output.accept(len(PROMPT), ids[:4], (), logprobs_of(ids[:4]))
    assert output.accept(len(PROMPT) + 1, ids[1:], (), logprobs_of(ids[1:]))
    response = answer.take()
    assert response is not None
    assert response.token_ids == ids[: len("one two")]
    assert list(response.logprobs) == logprobs_of(response.token_ids)


def test_of_what_is_resumed_there_are_no_log_probabilities(tokenizer: Tokenizer) -> None:
    answer, output, _ = make(tokenizer, num_resumed=2)
    assert output.accept(len(PROMPT), [70, 71], ())
    assert output.accept(len(PROMPT) + 2, [72], (), logprobs_of([72]))
    response = answer.take()
    assert response is not None
    assert (response.position, list(response.logprobs)) == (2, logprobs_of([72]))


def test_broken_characters_at_the_end_may_complete_a_stop_string(tokenizer: Tokenizer) -> None:
    answer, output, _ = make(tokenizer, stop=("e\ufffd",))
    first_byte, _ = tokenizer.encode("ü", add_special=False)
    feed(output, [*tokenizer.encode("one", add_special=False), first_byte])
    response = answer.take()
    assert response is not None
    delta, finished = answer.finish(FinishReason.LENGTH)
    assert response.text + ("" if delta is None else delta.text) == "on"
    assert finished == ChoiceFinished(FinishReason.STOP, "e\ufffd")


def test_stop_token_has_no_text(tokenizer: Tokenizer) -> None:
    (letter,) = tokenizer.encode("x", add_special=False)
    answer, output, _ = make(tokenizer, stop_token_ids=frozenset({letter}), min_tokens=2)
    feed(output, [letter])
    feed(output, [letter])
    response = answer.take()
    assert response is not None
    assert list(response.token_ids) == [letter, letter]
    assert response.text == "x", "before min_tokens it is a token like others"
    assert answer.finish(FinishReason.STOP) == (None, ChoiceFinished(FinishReason.STOP, letter))


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


def test_the_end_brings_the_text_that_was_held_back(tokenizer: Tokenizer) -> None:
    answer, output, _ = make(tokenizer, stop=("xy",))
    (letter,) = tokenizer.encode("x", add_special=False)
    feed(output, [letter])
    response = answer.take()
    assert response is not None
    assert response.text == ""
    assert answer.finish(FinishReason.LENGTH) == (
        Delta("x", [], 1, []),
        ChoiceFinished(FinishReason.LENGTH, None),
    )


def test_nothing_is_resumed_after_a_stop_string(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one stop two", add_special=False)
    num_whole = next(n for n in range(len(ids)) if "stop" in tokenizer.decode(ids[:n]))
    for num_resumed in range(1, len(ids) + 1):
        answer, output, _ = make(tokenizer, stop=("stop",), num_resumed=num_resumed)
        feed(output, ids[:num_resumed])
        if num_resumed <= num_whole:
            answer.check_resumed()
            assert output.stop_matched == (num_resumed == num_whole)
            continue
        with pytest.raises(InvalidRequestError, match="stop string") as caught:
            answer.check_resumed()
        assert caught.value.field == f"emitted_token_ids[{num_whole}]"


@pytest.mark.parametrize("num_resumed", range(1, 13))
def test_a_resumed_output_goes_on_as_if_it_had_not_stopped(
    tokenizer: Tokenizer, num_resumed: int
) -> None:
    ids = tokenizer.encode("ö one twä three", add_special=False)[:14]
    whole, output, _ = make(tokenizer, stop=("e t!",), max_unsent=100)
    texts = []
    for token_id in ids:
        feed(output, [token_id])
        delta = whole.take()
        assert delta is not None
        texts.append(delta.text)
    answer, output, _ = make(tokenizer, stop=("e t!",), num_resumed=num_resumed)
    feed(output, ids[:num_resumed])
    assert not answer.is_due
    assert answer.moments.first_token_s is None
    feed(output, ids[num_resumed:])
    delta = answer.take()
    assert delta is not None
    assert delta.position == num_resumed
    assert delta.token_ids == ids[num_resumed:]
    assert delta.text == "".join(texts[num_resumed:])


def test_emission_is_told_apart_from_writing(tokenizer: Tokenizer) -> None:
    gaps: list[tuple[int, float | None]] = []
    answer, output, clock = make(tokenizer, on_emitted=lambda n, gap: gaps.append((n, gap)))
    feed(output, [70])
    clock.now += 0.5
    feed(output, [71, 72])
    assert gaps == [(1, None), (2, 0.5)]
    assert answer.moments.last_written_s is None


@pytest.mark.parametrize("size", [1, 3, 200])
def test_parts_of_an_answer_stay_in_their_order(tokenizer: Tokenizer, size: int) -> None:
    """Who makes items of them makes the same ones, however many tokens came at once."""
    fields = {
        "reasoning_content": {"open": "<t>", "close": "</t>"},
        "tool_calls": {"open": "<c>", "close": "</c>", "content": "json"},
        "content": {"content": "text"},
    }
    parser = ResponseParser(ResponseTemplate.read({"fields": fields}), "", {"f": {}})
    ids = iter("abc")
    split = AnswerSplit(parser, lambda _: next(ids))
    answer, output, _ = make(tokenizer, split=split, max_unsent=200)
    call = '<c>{"name": "f", "arguments": {}}</c>'
    said = f"one{call}{call}two<t>three</t>{call}four"
    token_ids = [t for c in said for t in tokenizer.encode(c, add_special=False)]
    for at in range(0, len(token_ids), size):
        feed(output, token_ids[at : at + size])
    parts = []
    while (delta := answer.take()) is not None:
        parts.append((delta.text, delta.reasoning, "".join(c.call_id for c in delta.tool_calls)))
    assert parts == [
        ("one", "", "ab"),
        ("two", "", ""),
        ("", "three", ""),
        ("", "", "c"),
        ("four", "", ""),
    ]

"""What a client makes of a router's messages, over the calls of one answer."""

import pytest

from diptych.client import BrokenStreamError, FinishReason
from diptych.client.answer_reader import AnswerReader
from diptych.v1 import common_pb2, inference_pb2
from diptych.v1.inference_pb2 import (
    ChoiceFinished,
    Delta,
    GenerateRequest,
    GenerateResponse,
    SamplingOptions,
    Started,
    Summary,
    ToolCall,
)

STARTED = GenerateResponse(started=Started(request_id="r", model="m", seed=7))
FINISHED = GenerateResponse(choice_finished=ChoiceFinished(reason=common_pb2.FINISH_REASON_LENGTH))
SUMMARY = GenerateResponse(summary=Summary(usage=inference_pb2.Usage(num_resumed_tokens=3)))


def delta(position: int, *token_ids: int, text: str = "") -> GenerateResponse:
    return GenerateResponse(delta=Delta(position=position, token_ids=token_ids, text=text))


def reading(*responses: GenerateResponse) -> AnswerReader:
    """A reader that had these of a first call, and asks for the rest."""
    reader = AnswerReader(GenerateRequest(text="a", return_prompt_token_ids=True))
    reader.next_request()
    for response in responses:
        reader.read(response)
    reader.next_request()
    return reader


def test_before_anything_came_the_same_is_asked_again() -> None:
    assert reading().next_request() == GenerateRequest(text="a", return_prompt_token_ids=True)


def told(position: int, *values: float) -> GenerateResponse:
    logprobs = [common_pb2.TokenLogprobs(logprob=value) for value in values]
    part = common_pb2.PromptLogprobs(position=position, logprobs=logprobs)
    return GenerateResponse(prompt_logprobs=part)


def test_what_is_told_of_the_prompt_comes_once_with_the_first_token() -> None:
    reader = reading(STARTED, told(1, -1.0, -2.0), told(3, -3.0))
    assert reader.next_request().sampling.prompt_logprobs == 0, "the same is asked"
    for response in (STARTED, told(1, -1.0), told(2, -2.0, -3.0)):
        assert reader.read(response) is None
    first, second = reader.read(delta(0, 5)), reader.read(delta(1, 6))
    assert first is not None
    assert second is not None
    assert [each.logprob for each in first.prompt_logprobs] == [-1.0, -2.0, -3.0]
    assert second.prompt_logprobs == ()


@pytest.mark.parametrize("n", [1, 2])
def test_all_chunks_have_one_list_of_the_prompts_tokens(n: int) -> None:
    reader = AnswerReader(GenerateRequest(text="a", sampling=SamplingOptions(n=n)))
    reader.next_request()
    reader.read(GenerateResponse(started=Started(prompt_token_ids=[3, 4])))
    chunks = [reader.read(delta(0, 5)), reader.read(delta(1, 6))]
    ends = [GenerateResponse(choice_finished=ChoiceFinished(choice=each)) for each in range(n)]
    for end in ends:
        end.choice_finished.reason = common_pb2.FINISH_REASON_LENGTH
        chunks.append(reader.read(end))
    chunks.append(reader.read(SUMMARY))
    told_ids = [each.prompt_token_ids for each in chunks if each is not None]
    assert told_ids[0] == (3, 4)
    assert len(told_ids) >= 3
    assert {id(each) for each in told_ids} == {id(told_ids[0])}


def test_the_best_of_several_cannot_go_on_either() -> None:
    """Though one comes: which it would be is known only when all are there."""
    for best_of, can_go_on in ((0, True), (1, True), (2, False)):
        options = SamplingOptions(best_of=best_of) if best_of else None
        reader = AnswerReader(GenerateRequest(text="a", sampling=options))
        reader.next_request()
        reader.read(STARTED)
        assert reader.can_go_on, "nothing came"
        reader.read(GenerateResponse(delta=Delta(token_ids=[5])))
        assert reader.can_go_on == can_go_on


def test_of_several_choices_each_has_its_own_positions_and_its_own_end() -> None:
    reader = AnswerReader(GenerateRequest(text="a", sampling=SamplingOptions(n=2)))
    reader.next_request()
    reader.read(STARTED)
    assert reader.can_go_on, "nothing came"

    def of(choice: int, position: int, *token_ids: int) -> GenerateResponse:
        return GenerateResponse(delta=Delta(choice=choice, position=position, token_ids=token_ids))

    def end(choice: int) -> GenerateResponse:
        reason = common_pb2.FINISH_REASON_LENGTH
        return GenerateResponse(choice_finished=ChoiceFinished(choice=choice, reason=reason))

    chunks = [reader.read(each) for each in (of(0, 0, 5, 6), of(1, 0, 7), of(0, 2, 8), end(0))]
    assert [chunk and (chunk.choice, chunk.position) for chunk in chunks] == [
        (0, 0),
        (1, 0),
        (0, 2),
        (0, 3),
    ]
    assert not reader.can_go_on
    with pytest.raises(BrokenStreamError, match="position 3 came where 1 was due"):
        reader.read(of(1, 3, 9))
    with pytest.raises(BrokenStreamError, match="without the end of each choice"):
        reader.read(SUMMARY)
    reader.read(end(1))
    last = reader.read(SUMMARY)
    assert last is not None
    assert last.usage is not None
    assert reader.is_whole


def test_what_is_told_of_the_prompt_has_no_gaps() -> None:
    reader = reading(STARTED)
    reader.read(told(1, -1.0))
    with pytest.raises(BrokenStreamError, match="at 3 came where 2 was due"):
        reader.read(told(3, -3.0))


def test_the_rest_is_asked_of_the_same_model_with_the_same_seed() -> None:
    asked = reading(STARTED, delta(0, 5, 6), delta(2, 7)).next_request()
    assert (asked.text, asked.model, asked.request_id) == ("a", "m", "r")
    assert (asked.sampling.seed, list(asked.emitted_token_ids)) == (7, [5, 6, 7])
    assert not asked.return_prompt_token_ids, "it has come"


def test_the_rest_of_a_chat_is_asked_of_the_same_moment() -> None:
    chat = inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user")])
    reader = AnswerReader(GenerateRequest(chat=chat))
    assert reader.next_request().chat.now_unix_s == 0
    reader.read(GenerateResponse(started=Started(request_id="r", model="m", now_unix_s=9)))
    chunk = reader.read(delta(0, 5))
    assert chunk is not None
    assert (chunk.now_unix_s, reader.next_request().chat.now_unix_s) == (9, 9)
    assert not reading(STARTED, delta(0, 5)).next_request().HasField("chat")


@pytest.mark.parametrize("position", [1, 3])
def test_repeated_or_skipped_tokens_are_an_error(position: int) -> None:
    reader = reading(STARTED, delta(0, 5, 6))
    reader.read(STARTED)
    with pytest.raises(BrokenStreamError, match=f"position {position} came where 2 was due"):
        reader.read(delta(position, 7))


@pytest.mark.parametrize("other", [Started(model="m", seed=8), Started(model="n", seed=7)])
def test_another_seed_or_model_is_another_answer(other: Started) -> None:
    reader = reading(STARTED, delta(0, 5))
    with pytest.raises(BrokenStreamError, match="would go on with"):
        reader.read(GenerateResponse(started=other))


OF_A = GenerateResponse(started=Started(request_id="r", model="m", seed=7, model_digest="a"))
OF_B = GenerateResponse(started=Started(request_id="r", model="m", seed=7, model_digest="b"))


def test_the_rest_is_asked_of_the_same_weights() -> None:
    reader = reading(OF_A, delta(0, 5))
    assert reader.next_request().model_digest == "a"
    with pytest.raises(BrokenStreamError, match="would go on with model_digest b, not a"):
        reader.read(OF_B)
    for who_does_not_say in (STARTED, OF_A):
        again = reading(OF_A, delta(0, 5))
        again.read(who_does_not_say)
        chunk = again.read(delta(1, 6))
        assert chunk is not None
        assert chunk.model_digest == "a"


def test_without_a_token_other_weights_may_begin_anew() -> None:
    reader = reading(OF_A)
    assert not reader.next_request().model_digest
    reader.read(OF_B)
    reader.read(delta(0, 5))
    assert reader.next_request().model_digest == "b"


def test_what_another_program_began_is_of_the_weights_that_it_names() -> None:
    begun = GenerateRequest(text="a", emitted_token_ids=[5], model_digest="b")
    reader = AnswerReader(begun)
    assert reader.next_request().model_digest == "b"
    with pytest.raises(BrokenStreamError, match="model_digest a, not b"):
        reader.read(OF_A)


def test_text_behind_the_last_token_is_shown_once() -> None:
    """It has no token of its own, so whoever goes on sends it again."""
    reader = reading(STARTED, delta(0, 5, text="a"), delta(1, text="bc"))
    assert reader.read(delta(1, text="bc")) is None
    again = reading(STARTED, delta(0, 5, text="a"), delta(1, text="bc"))
    more = again.read(delta(1, text="bcd"))
    assert more is not None
    assert more.text == "d"


def called(name: str, *token_ids: int, thought: str = "") -> GenerateResponse:
    calls = [ToolCall(id=name, name=name, arguments="{}")]
    return GenerateResponse(
        delta=Delta(position=1, token_ids=token_ids, reasoning=thought, tool_calls=calls)
    )


def test_reasoning_and_calls_come_once_too() -> None:
    reader = reading(STARTED, delta(0, 5, text="a"))
    chunk = reader.read(called("f", 6, thought="hm"))
    assert chunk is not None
    assert (chunk.reasoning, [call.name for call in chunk.tool_calls]) == ("hm", ["f"])
    behind = reading(STARTED, delta(0, 5), called("f", thought="h"))
    assert behind.read(called("f", thought="h")) is None
    other = reading(STARTED, delta(0, 5), called("f"))
    with pytest.raises(BrokenStreamError, match="is not what had come"):
        other.read(called("g"))
    other = reading(STARTED, delta(0, 5), called("f", thought="h"))
    with pytest.raises(BrokenStreamError, match="is not what had come"):
        other.read(called("f", thought="i"))


@pytest.mark.parametrize("wrong", [delta(1, text="bx"), delta(1, 6, text="bc")])
def test_other_text_in_its_place_is_an_error(wrong: GenerateResponse) -> None:
    reader = reading(STARTED, delta(0, 5, text="a"), delta(1, text="bc"))
    with pytest.raises(BrokenStreamError, match="not what had come"):
        reader.read(wrong)


def test_text_that_is_not_repeated_is_an_error() -> None:
    reader = reading(STARTED, delta(0, 5, text="a"), delta(1, text="bc"))
    reader.read(FINISHED)
    with pytest.raises(BrokenStreamError, match="before the text"):
        reader.read(SUMMARY)


def test_a_stream_that_ends_well_has_an_end() -> None:
    reader = reading(STARTED, delta(0, 5))
    with pytest.raises(BrokenStreamError, match="without a summary"):
        reader.check_whole()
    with pytest.raises(BrokenStreamError, match="without a finish reason"):
        reader.read(SUMMARY)
    reader.read(FINISHED)
    last = reader.read(SUMMARY)
    assert last is not None
    assert last.usage is not None
    assert (last.finish_reason, last.usage.num_resumed_tokens) == (FinishReason.LENGTH, 3)
    assert reader.is_whole
    reader.check_whole()


@pytest.mark.parametrize("n", [1, 2])
def test_an_end_that_has_no_name_here_is_whole_and_without_a_reason(n: int) -> None:
    """A newer router may have more of them."""
    reader = AnswerReader(GenerateRequest(sampling=SamplingOptions(n=n)))
    reader.read(STARTED)
    ends = [GenerateResponse(choice_finished=ChoiceFinished(choice=each)) for each in range(n)]
    for end in ends:
        end.choice_finished.reason = 99  # type: ignore[assignment]
        reader.read(end)
    last = reader.read(SUMMARY)
    assert last is not None
    assert last.finish_reason is None
    assert last.usage is not None
    assert reader.is_whole


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("token_id", [0, 7, None])
def test_the_token_that_ended_it_is_told_and_no_other_is(n: int, token_id: int | None) -> None:
    """Of those that there may be 0 is one."""
    reader = AnswerReader(GenerateRequest(sampling=SamplingOptions(n=n)))
    reader.read(STARTED)
    finished = ChoiceFinished(reason=common_pb2.FINISH_REASON_STOP, stop_token_id=token_id)
    chunk = reader.read(GenerateResponse(choice_finished=finished)) or reader.read(SUMMARY)
    assert chunk is not None
    assert chunk.stop_token_id == token_id


def test_each_choice_has_to_say_why_it_ended() -> None:
    reader = AnswerReader(GenerateRequest(sampling=SamplingOptions(n=2)))
    reader.read(STARTED)
    with pytest.raises(BrokenStreamError, match="without a finish reason"):
        reader.read(GenerateResponse(choice_finished=ChoiceFinished(choice=1)))


def test_a_stream_says_first_what_the_request_became() -> None:
    with pytest.raises(BrokenStreamError, match="what the request became"):
        reading(delta(0, 5))

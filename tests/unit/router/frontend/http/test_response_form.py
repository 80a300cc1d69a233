"""Events become a response of OpenAI's, whole or as typed events that end with the same one."""

import json
from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.errors import NoWorkerError, QueueFullError
from diptych.finish_reason import FinishReason
from diptych.sampling_params import SamplingOptions
from diptych.text.token_text import TokenText
from diptych.token_logprobs import TokenLogprobs
from router.frontend.http.answer_writer import Answered
from router.frontend.http.asked import Asked, Envelope
from router.frontend.http.errors import answer_to
from router.frontend.http.response_form import StreamedResponse, WholeResponse
from router.frontend.http.response_request import read_response
from router.generation.answer import (
    CalledTool,
    ChoiceFinished,
    Delta,
    GenerationEvent,
    Said,
    Started,
    Summary,
    Timing,
    Usage,
)

USAGE = Usage(num_prompt_tokens=5, num_output_tokens=30, num_cached_tokens=4)
ENVELOPE = Envelope(request_id="r", num_bytes=9, max_model_len=100)
CALLS = (CalledTool("1", "f", "{}"), CalledTool("2", "g", '{"x": 1}'))


class Spelt:
    """As a tokenizer's texts: each token is its id, written out."""

    def spelling(self, token_id: int) -> bytes:
        return str(token_id).encode()


def asked(**members: Any) -> Asked:
    return read_response({"model": "m", "input": "hi", **members}, ENVELOPE)


ANSWERED = Answered(
    request_id="r",
    model="m",
    created_s=17,
    text=cast(TokenText, Spelt()),
    recommended=SamplingOptions(temperature=0.2),
)


def events_of(
    said: Sequence[Said], reason: FinishReason = FinishReason.STOP
) -> list[GenerationEvent]:
    deltas = [
        Delta("", [position], position, [], (TokenLogprobs(-float(position), (), ()),)).saying(each)
        for position, each in enumerate(said)
    ]
    return [
        Started("r", "m", 0, ()),
        *deltas,
        ChoiceFinished(reason),
        Summary(USAGE, Timing(ttft_s=0.5, total_s=3.7)),
    ]


def streamed(events: Sequence[GenerationEvent], **members: Any) -> list[dict[str, Any]]:
    stream = StreamedResponse(asked(**members), ANSWERED)
    read = []
    for written in b"".join(map(stream.send, events)).decode().split("\n\n")[:-1]:
        name, data = written.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        read.append(event)
    return read


def whole(events: Sequence[GenerationEvent], **members: Any) -> Any:
    answer = WholeResponse(asked(**members), ANSWERED)
    for event in events:
        answer.add(event)
    return answer.content()


def test_the_order_of_events() -> None:
    said = [Said(reasoning="a"), Said(reasoning="b", text="c"), Said("d", "", CALLS[:1])]
    read = streamed(events_of(said))
    told = [(each["type"].removeprefix("response."), each.get("output_index")) for each in read]
    assert told == [
        ("created", None),
        ("in_progress", None),
        ("output_item.added", 0),
        ("content_part.added", 0),
        ("reasoning_text.delta", 0),
        ("reasoning_text.delta", 0),
        ("reasoning_text.done", 0),
        ("content_part.done", 0),
        ("output_item.done", 0),
        ("output_item.added", 1),
        ("content_part.added", 1),
        ("output_text.delta", 1),
        ("output_text.delta", 1),
        ("output_text.done", 1),
        ("content_part.done", 1),
        ("output_item.done", 1),
        ("output_item.added", 2),
        ("function_call_arguments.delta", 2),
        ("function_call_arguments.done", 2),
        ("output_item.done", 2),
        ("completed", None),
    ]
    assert [each["sequence_number"] for each in read] == list(range(len(read)))
    begun, ended = read[0]["response"], read[-1]["response"]
    assert (begun["status"], begun["output"], begun["usage"]) == ("in_progress", [], None)
    done = [each["item"] for each in read if each["type"] == "response.output_item.done"]
    assert ended["output"] == done
    assert [(item["type"], item["status"]) for item in done] == [
        ("reasoning", "completed"),
        ("message", "completed"),
        ("function_call", "completed"),
    ]
    ids = [item["id"] for item in done]
    assert ids == ["rs_r_0", "msg_r_1", "fc_r_2"]
    assert [each["item_id"] for each in read if "item_id" in each] == sorted(
        (each["item_id"] for each in read if "item_id" in each), key=ids.index
    )


def test_one_object_says_all() -> None:
    said = [Said(reasoning="a"), Said(), Said("b"), Said("c", "", CALLS)]
    answer = whole(events_of(said), metadata={"a": "b"}, instructions="i", return_timing=True)
    assert answer["id"] == "resp_r"
    assert (answer["object"], answer["created_at"], answer["model"]) == ("response", 17, "m")
    assert (answer["status"], answer["error"], answer["incomplete_details"]) == (
        "completed",
        None,
        None,
    )
    assert (answer["store"], answer["instructions"], answer["metadata"]) == (False, "i", {"a": "b"})
    reasoning, message, *calls = answer["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "a"}]
    assert reasoning["summary"] == []
    (part,) = message["content"]
    assert (message["role"], part["type"], part["text"]) == ("assistant", "output_text", "bc")
    assert [(call["call_id"], call["name"], call["arguments"]) for call in calls] == list(CALLS)
    assert answer["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 4},
        "output_tokens": 30,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 35,
    }
    assert answer["timing"]["ttft_s"] == 0.5
    assert "timing" not in whole(events_of(said))


def test_every_state_of_a_response_has_the_members_that_its_schema_demands() -> None:
    """As sampled, whoever said so: the request, the model's makers, or nobody."""
    members = {"top_p": 0.5, "prompt_cache_key": "k", "safety_identifier": "me"}
    sampled = {"presence_penalty": 0, "frequency_penalty": 0, "temperature": 0.2, "top_p": 0.5}
    states = [
        (each["response"], each["type"])
        for each in streamed(events_of([Said("a")]), **members)
        if "response" in each
    ]
    assert [kind for _, kind in states] == [
        "response.created",
        "response.in_progress",
        "response.completed",
    ]
    for response, kind in states:
        assert {**response, **sampled, **members, "max_tool_calls": None} == response
        assert response["completed_at"] == (20 if kind == "response.completed" else None)
    assert whole(events_of([Said("a")]))["prompt_cache_key"] is None


@pytest.mark.parametrize("said", [[Said("a")], [Said(reasoning="a")], [Said()]])
def test_an_answer_that_was_cut_off_is_incomplete(said: list[Said]) -> None:
    events = events_of(said, FinishReason.LENGTH)
    last = streamed(events)[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"] == whole(events)
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["completed_at"] is None
    (item,) = last["response"]["output"]
    assert item["status"] == last["response"]["status"] == "incomplete"


def test_an_answer_of_nothing_is_an_empty_message() -> None:
    (message,) = whole(events_of([Said()]))["output"]
    assert (message["type"], message["content"][0]["text"]) == ("message", "")


@given(st.data())
def test_however_an_answer_is_cut_the_same_is_said(data: st.DataObject) -> None:
    def pieces(text: str) -> list[str]:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
        return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    said = [Said(reasoning=each) for each in pieces("what it thinks")]
    said += [Said(each) for each in pieces("what it says")]
    said += [Said(tool_calls=(call,)) for call in CALLS]
    events = events_of(said)
    read = streamed(events)
    assert read[-1]["response"] == whole(events)
    thought, message, *calls = read[-1]["response"]["output"]
    assert thought["content"][0]["text"] == "what it thinks"
    assert message["content"][0]["text"] == "what it says"
    assert len(calls) == 2
    for index, text in enumerate(["what it thinks", "what it says", "{}", '{"x": 1}']):
        deltas = [e["delta"] for e in read if "delta" in e and e["output_index"] == index]
        assert "".join(deltas) == text
        assert all(deltas)


def test_log_probabilities_are_those_of_the_message() -> None:
    """The reasoning has no place for its own; those that had no text yet come with the next."""
    said = [Said(reasoning="a"), Said(), Said("b"), Said(), Said("c"), Said("", "", CALLS[:1])]
    include = ["message.output_text.logprobs"]
    read = streamed(events_of(said), include=include)
    deltas = [e for e in read if e["type"] == "response.output_text.delta"]
    assert [[entry["token"] for entry in e["logprobs"]] for e in deltas] == [["1", "2"], ["3", "4"]]
    (part,) = read[-1]["response"]["output"][1]["content"]
    assert [entry["logprob"] for entry in part["logprobs"]] == [-1, -2, -3, -4]
    (part,) = whole(events_of(said))["output"][1]["content"]
    assert part["logprobs"] == []


@given(st.lists(st.tuples(st.sampled_from(["", "a", "bc"]), st.booleans()), min_size=1))
def test_however_a_message_is_cut_each_token_has_its_log_probability(
    tokens: list[tuple[str, bool]],
) -> None:
    """The last as well, which ended it and has no text; true: another delta begins with it."""
    pieces: list[tuple[str, list[int]]] = []
    for token_id, (text, is_next) in enumerate([*tokens, ("", tokens[0][1])]):
        if is_next or not pieces:
            pieces.append((text, [token_id]))
        else:
            before, ids = pieces.pop()
            pieces.append((before + text, [*ids, token_id]))
    deltas = [
        Delta(text, ids, ids[-1], [], tuple(TokenLogprobs(-float(each), (), ()) for each in ids))
        for text, ids in pieces
    ]
    started, ended, summary = events_of([])
    events = [started, *deltas, ended, summary]
    include = ["message.output_text.logprobs"]
    read = streamed(events, include=include)
    (message,) = whole(events, include=include)["output"]
    (part,) = message["content"]
    expected = [str(token_id) for token_id in range(len(tokens) + 1)]
    assert [entry["token"] for entry in part["logprobs"]] == expected
    deltas_told = [e["logprobs"] for e in read if e["type"] == "response.output_text.delta"]
    assert [entry for entries in deltas_told for entry in entries] == part["logprobs"]
    assert read[-1]["response"]["output"] == [message]


def test_what_ends_thoughts_or_a_call_has_no_place_for_its_log_probability() -> None:
    include = ["message.output_text.logprobs"]
    for said in ([Said(reasoning="a"), Said()], [Said(tool_calls=CALLS[:1]), Said()]):
        (item,) = whole(events_of(said), include=include)["output"]
        assert item["type"] != "message"
    said = [Said("b"), Said(tool_calls=CALLS[:1]), Said()]
    message, _ = whole(events_of(said), include=include)["output"]
    assert [entry["token"] for entry in message["content"][0]["logprobs"]] == ["0"]


@pytest.mark.parametrize(
    ("error", "code"),
    [(NoWorkerError("gone"), "server_error"), (QueueFullError("full"), "rate_limit_exceeded")],
)
def test_a_stream_that_broke_off_ends_with_what_was_done(
    error: NoWorkerError | QueueFullError, code: str
) -> None:
    stream = StreamedResponse(asked(), ANSWERED)
    started, *deltas = events_of([Said(reasoning="a"), Said("b")])[:3]
    sent = b"".join(map(stream.send, [started, *deltas])).count(b"\n\n")
    name, data, _, _ = "".join(stream.fail(answer_to(error))).split("\n")
    failed = json.loads(data.removeprefix("data: "))
    assert name == "event: response.failed"
    assert failed["sequence_number"] == sent
    response = failed["response"]
    assert (response["status"], response["error"]["code"]) == ("failed", code)
    assert response["error"]["message"] == f"{error.reason.lower()}: {error.message}"
    assert [item["type"] for item in response["output"]] == ["reasoning"]

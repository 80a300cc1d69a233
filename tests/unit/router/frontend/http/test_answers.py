"""Events become OpenAI's JSON, whole or streamed, and failures its error object."""

import json
import math
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.errors import (
    DeadlineUnreachableError,
    DiptychError,
    InvalidRequestError,
    ModelNotFoundError,
    NoWorkerError,
    QueueFullError,
    all_reasons,
    reasons_with,
)
from diptych.finish_reason import FinishReason
from diptych.text.tokenizer import Tokenizer
from diptych.token_logprobs import PromptLogprobs, TokenLogprobs
from router.frontend.http.answer_form import (
    COMPLETION,
    STREAM_END,
    Form,
    Heading,
    StreamedAnswer,
    WholeAnswer,
)
from router.frontend.http.chat_form import CHAT
from router.frontend.http.errors import STATUSES, RefusedError, answer_to, bug
from router.frontend.http.logprob_form import CompletionLogprobs, by_token_id
from router.frontend.http.prompt_form import PromptForm, PromptWish
from router.generation.answer import (
    CalledTool,
    ChoiceFinished,
    Delta,
    GenerationEvent,
    KVPath,
    Started,
    Summary,
    Timing,
    Transfer,
    Usage,
)

USAGE = Usage(num_prompt_tokens=5, num_output_tokens=3, num_cached_tokens=4)


@pytest.mark.parametrize("form", [CHAT, COMPLETION])
def test_a_piece_is_one_line_to_every_reader(form: Form) -> None:
    """Some split at each character that Unicode calls a line's end."""
    ends = [chr(code) for code in range(0x3000) if len(f"a{chr(code)}b".splitlines()) > 1]
    assert "\u2028" in ends
    text = "".join(ends)
    stream = StreamedAnswer(heading(form), includes_usage=False)
    piece = stream.send(Delta(text, [1], 0, [])).decode()
    assert piece.splitlines() == [piece.removesuffix("\n\n"), ""]
    (choice,) = json.loads(piece.removeprefix("data: "))["choices"]
    assert text in (choice.get("text"), choice.get("delta", {}).get("content"))


@pytest.mark.parametrize("form", [CHAT, COMPLETION])
@pytest.mark.parametrize("includes_usage", [False, True])
def test_what_pieces_say_alike_is_written_once(
    form: Form, includes_usage: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_written = 0
    write = Heading.choice

    def counting(*given: Any) -> Any:
        nonlocal num_written
        num_written += 1
        return write(*given)

    monkeypatch.setattr(Heading, "choice", counting)
    texts = ["a", '"\\\n', "\0", "\u2028é", "", "b"]
    stream = StreamedAnswer(heading(form), includes_usage=includes_usage)
    pieces = [stream.send(Delta(text, [1], at, [])) for at, text in enumerate(texts)]
    assert num_written == 2, "for the first, and for all others"
    each_written = []
    for at, text in enumerate(texts):
        alone = StreamedAnswer(heading(form), includes_usage=includes_usage)
        alone.send(Delta("x", [1], at, []))
        alone._around = None  # so that it is written as a whole
        each_written.append(alone.send(Delta(text, [1], at, [])))
    assert pieces[1:] == each_written[1:]


def heading(form: Form) -> Heading:
    return Heading(
        form=form, request_id="r", model="m", created_s=17, stop_token_ids=frozenset({9})
    )


def events_of(
    texts: list[str],
    reason: FinishReason = FinishReason.LENGTH,
    matched: str | int | None = None,
) -> list[GenerationEvent]:
    deltas = [Delta(text, [1], position, []) for position, text in enumerate(texts)]
    ends: list[GenerationEvent] = [ChoiceFinished(reason, matched), Summary(USAGE, Timing())]
    return [Started("r", "m", 0, ()), *deltas, *ends]


def streamed(
    form: Form,
    events: list[GenerationEvent],
    *,
    includes_usage: bool = False,
    counts_along: bool = False,
) -> list[dict[str, Any]]:
    stream = StreamedAnswer(heading(form), includes_usage, counts_along)
    data = b"".join(map(stream.send, events))
    assert data.endswith(STREAM_END)
    pieces = data.removesuffix(STREAM_END).decode().split("\n\n")
    return [json.loads(piece.removeprefix("data: ")) for piece in pieces if piece]


def whole(form: Form, events: list[GenerationEvent]) -> Any:
    answer = WholeAnswer(heading(form))
    for event in events:
        answer.add(event)
    return answer.content()


TRANSFER = Transfer(
    transport="nixl", num_bytes=64, num_tokens=5, read_s=0.1, exposed_s=0.2, total_s=0.3,
    digest_s=0.01,
)  # fmt: skip


@pytest.mark.parametrize("includes_usage", [False, True])
def test_timing_is_told_to_who_asks_for_it(includes_usage: bool) -> None:
    timing = Timing(ttft_s=0.5, transfer=TRANSFER, kv_path=KVPath.DISAGGREGATED)
    events = [*events_of(["a"])[:-1], Summary(USAGE, timing)]
    stream = StreamedAnswer(heading(CHAT), includes_usage, tells_timing=True)
    *_, last = b"".join(map(stream.send, events)).removesuffix(STREAM_END).decode().split("data: ")
    answer = WholeAnswer(heading(CHAT), tells_timing=True)
    for event in events:
        answer.add(event)
    in_stream = json.loads(last)
    assert in_stream["choices"] == []
    assert ("usage" in in_stream) == includes_usage
    told = in_stream["timing"]
    assert told == answer.content()["timing"]
    assert (told["ttft_s"], told["kv_path"], told["transfer"]["num_bytes"]) == (
        0.5, "disaggregated", 64,
    )  # fmt: skip
    assert "timing" not in whole(CHAT, events)
    assert not any("timing" in piece for piece in streamed(CHAT, events, includes_usage=True))


@settings(deadline=None)
@given(texts=st.lists(st.text(), max_size=5))
def test_detail_9_a_stream_says_what_one_piece_says(texts: list[str]) -> None:
    events = events_of(texts)
    assert (
        "".join(piece["choices"][0]["text"] for piece in streamed(COMPLETION, events))
        == whole(COMPLETION, events)["choices"][0]["text"]
    )
    deltas = [piece["choices"][0]["delta"] for piece in streamed(CHAT, events)]
    assert (
        "".join(delta.get("content", "") for delta in deltas)
        == whole(CHAT, events)["choices"][0]["message"]["content"]
    )
    assert [index for index, delta in enumerate(deltas) if "role" in delta] == [0]


def test_details_7_and_8_calls_of_tools() -> None:
    """Index, id, type and name once, then the model's own text; whole and streamed alike."""
    first, second = CalledTool("i", "f", '{"x":  1}'), CalledTool("j", "g", "{}")
    _, *ends = events_of([], FinishReason.TOOL_CALLS)
    said = Delta("", [1], 0, [], reasoning="hm", tool_calls=(first,))
    events = [said, Delta("", [2], 1, [], tool_calls=(second,)), *ends]
    (choice,) = whole(CHAT, events)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == (None, "hm")
    assert message["reasoning"] == "hm", "by its other name"
    assert [(call["id"], call["type"]) for call in message["tool_calls"]] == [
        ("i", "function"),
        ("j", "function"),
    ]
    functions = [call["function"] for call in message["tool_calls"]]
    assert functions == [{"name": c.name, "arguments": c.arguments} for c in (first, second)]
    choices = [piece["choices"][0] for piece in streamed(CHAT, events)]
    assert [each["finish_reason"] for each in choices] == [None] * 5 + ["tool_calls"]
    deltas = [each["delta"] for each in choices]
    thought = {"reasoning_content": "hm", "reasoning": "hm"}
    assert deltas[0] == {"role": "assistant", "content": "", **thought}
    begun = {"index": 1, "id": "j", "type": "function", "function": {"name": "g", "arguments": ""}}
    assert deltas[3:] == [
        {"tool_calls": [begun]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
        {},
    ]


def test_detail_7_calls_are_counted_through_the_whole_stream() -> None:
    calls = [CalledTool(name, name, "{}") for name in "abcd"]
    said = [calls[:2], calls[2:3], calls[3:]]
    deltas = [
        Delta("", [1], position, [], tool_calls=tuple(each)) for position, each in enumerate(said)
    ]
    pieces = streamed(CHAT, [*deltas, *events_of([], FinishReason.TOOL_CALLS)[1:]])
    told = joined([piece["choices"][0]["delta"].get("tool_calls", []) for piece in pieces])
    assert [(each["index"], each.get("id")) for each in told] == [
        (0, "a"), (0, None), (1, "b"), (1, None), (2, "c"), (2, None), (3, "d"), (3, None),
    ]  # fmt: skip


def test_details_1_and_4_the_end_of_a_stream() -> None:
    read = streamed(CHAT, events_of(["a", "b"]), includes_usage=True)
    reasons = [piece["choices"][0]["finish_reason"] for piece in read[:-1]]
    assert reasons == [None, None, "length"]
    assert [piece["usage"] for piece in read[:-1]] == [None] * 3
    assert read[-1]["choices"] == []
    assert read[-1]["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert all("usage" not in piece for piece in streamed(CHAT, events_of(["a"])))


def found(token_id: int, *top: int) -> TokenLogprobs:
    """A log probability that tells the token, and its place those of the likeliest."""
    return TokenLogprobs(-float(token_id), top, tuple(-0.5 * place for place in range(len(top))))


@pytest.mark.parametrize("is_stream", [False, True])
def test_details_13_and_14_an_echo_comes_before_the_answer(
    tokenizer: Tokenizer, *, is_stream: bool
) -> None:
    prompt_ids = tokenizer.encode("ab c", add_special=False)
    told = PromptLogprobs(1, tuple(found(each, 1, 2) for each in prompt_ids[1:]))
    first, *rest = events_of(["x", "y"])
    assert isinstance(first, Started)
    deltas = [each._replace(logprobs=(found(1, 2),)) if isinstance(each, Delta) else each
              for each in rest]  # fmt: skip
    events = [first._replace(prompt_token_ids=tuple(prompt_ids)), told, *deltas]
    logprobs = CompletionLogprobs(tokenizer.text)
    prompt = PromptForm(PromptWish(echoes=True, num_top=1), tokenizer.text, logprobs)
    answer: WholeAnswer | StreamedAnswer
    if is_stream:
        answer = StreamedAnswer(heading(COMPLETION), False, False, logprobs, prompt)
        data = b"".join(map(answer.send, events)).removesuffix(STREAM_END).decode()
        read = [json.loads(each.removeprefix("data: ")) for each in data.split("\n\n") if each]
        choices = [piece["choices"][0] for piece in read]
    else:
        answer = WholeAnswer(heading(COMPLETION), logprobs, prompt)
        for event in events:
            answer.add(event)
        (choice,) = choices = list(answer.content()["choices"])  # type: ignore[call-overload]
        assert choice["prompt_logprobs"][0] is None
        assert [len(each) for each in choice["prompt_logprobs"][1:]] == [2] * (len(prompt_ids) - 1)
    assert "".join(choice["text"] for choice in choices) == "ab cxy"
    known = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    values = joined([each["token_logprobs"] for each in known])
    assert values == [None, *(-float(each) for each in prompt_ids[1:]), -1.0, -1.0]
    assert joined([each["top_logprobs"] for each in known])[0] is None
    offsets = joined([each["text_offset"] for each in known])
    assert offsets[len(prompt_ids)] == len("ab c"), "the answer's begin behind the echo"


@pytest.mark.parametrize("text", ["ab c", "<s>ab<s> c", "é😀<s>z"])
def test_detail_13_offsets_are_into_what_the_client_wrote(text: str, tokenizer: Tokenizer) -> None:
    """Which spells special tokens, that an answer never shows."""
    prompt_ids = tokenizer.encode(text, add_special=False)
    bos = min(tokenizer.special_token_ids)
    told = PromptLogprobs(1, tuple(found(each, 1) for each in prompt_ids))
    first, *rest = events_of(["x"])
    assert isinstance(first, Started)
    logprobs = CompletionLogprobs(tokenizer.text)
    prompt = PromptForm(PromptWish(echoes=True, text=text), tokenizer.text, logprobs)
    answer = WholeAnswer(heading(COMPLETION), logprobs, prompt)
    deltas = (e._replace(logprobs=(found(1, 2),)) if isinstance(e, Delta) else e for e in rest)
    ids = (bos, *prompt_ids) if not text.startswith("<s>") else (*prompt_ids,)
    if len(ids) == len(prompt_ids):
        told = told._replace(logprobs=told.logprobs[1:])
    for event in (first._replace(prompt_token_ids=ids), told, *deltas):
        answer.add(event)
    choices: Any = answer.content()["choices"]
    (choice,) = choices
    members = choice["logprobs"]
    known = zip(members["text_offset"], members["tokens"], strict=True)
    for offset, token in list(known)[len(ids) - len(prompt_ids) : len(ids)]:
        assert "\ufffd" in token or choice["text"].startswith(token, offset)
    assert members["text_offset"][len(ids)] == len(text)


def test_of_a_prompt_alone_nothing_is_said_behind_it(tokenizer: Tokenizer) -> None:
    first, *rest = events_of(["x"])
    assert isinstance(first, Started)
    wish = PromptWish(echoes=True, is_all=True, text="as it was written")
    answer = WholeAnswer(heading(COMPLETION), None, PromptForm(wish, tokenizer.text))
    for event in (first._replace(prompt_token_ids=(5,)), *rest):
        answer.add(event)
    content: Any = answer.content()
    assert content["choices"][0]["text"] == "as it was written"
    assert content["usage"]["completion_tokens"] == 0


def joined(parts: list[list[Any]]) -> list[Any]:
    return [item for part in parts for item in part]


def with_logprobs(form: Form, tokenizer: Tokenizer, deltas: list[Delta]) -> tuple[Any, list[Any]]:
    """The choices: of a whole answer, and of each piece of a stream."""
    events: list[GenerationEvent] = [*deltas]
    events += [ChoiceFinished(FinishReason.LENGTH), Summary(USAGE, Timing())]
    answer = WholeAnswer(heading(form), form.logprobs_of(tokenizer.text))
    stream = StreamedAnswer(
        heading(form), includes_usage=False, logprobs=form.logprobs_of(tokenizer.text)
    )
    data = b""
    for event in events:
        answer.add(event)
        data += stream.send(event)
    pieces = data.removesuffix(STREAM_END).decode().split("\n\n")
    read = [json.loads(piece.removeprefix("data: "))["choices"][0] for piece in pieces if piece]
    content: Any = answer.content()
    return content["choices"][0], read


def test_details_12_and_13_log_probabilities_of_a_chat(tokenizer: Tokenizer) -> None:
    (smile,) = "😀"
    ids = tokenizer.encode(f"a{smile}", add_special=False)
    end = min(tokenizer.special_token_ids)
    deltas = [
        Delta("a", ids[:1], 0, [], (found(ids[0], ids[0], end),)),
        Delta("", ids[1:2], 1, [], (found(ids[1]),)),
        Delta(smile, [*ids[2:], end], 2, [], tuple(map(found, [*ids[2:], end]))),
    ]
    whole, pieces = with_logprobs(CHAT, tokenizer, deltas)
    told = whole["logprobs"]["content"]
    assert [entry["logprob"] for entry in told] == [-float(i) for i in [*ids, end]]
    assert bytes(joined([entry["bytes"] for entry in told[:-1]])).decode() == f"a{smile}"
    assert [entry["token"] for entry in (told[0], told[1], told[-1])] == ["a", "\ufffd", "<s>"]
    assert told[0]["top_logprobs"] == [
        {"token": "a", "logprob": 0.0, "bytes": [97]},
        {"token": "<s>", "logprob": -0.5, "bytes": list(b"<s>")},
    ]
    assert told[1]["top_logprobs"] == []
    streamed_told = [piece["logprobs"]["content"] for piece in pieces if piece["logprobs"]]
    assert joined(streamed_told) == told
    assert [piece["logprobs"] is None for piece in pieces] == [False, False, True]


def test_details_12_and_13_log_probabilities_of_a_completion(tokenizer: Tokenizer) -> None:
    (smile,) = "😀"
    ids = tokenizer.encode(f"a{smile}bc", add_special=False)
    deltas = [
        Delta("a", ids[:1], 0, [], (found(ids[0], ids[0], ids[-1]),)),
        Delta(f"{smile}bc", ids[1:], 1, [], tuple(found(i, 0) for i in ids[1:])),
    ]
    whole, pieces = with_logprobs(COMPLETION, tokenizer, deltas)
    told = whole["logprobs"]
    assert told["token_logprobs"] == [-float(i) for i in ids]
    assert told["tokens"][0] == "a"
    assert told["tokens"][-1] == tokenizer.decode(ids[-1:])
    assert told["top_logprobs"][0] == {"a": 0.0, told["tokens"][-1]: -0.5}
    assert told["top_logprobs"][-1] == {told["tokens"][-1]: -float(ids[-1]), "<s>": 0.0}
    assert told["text_offset"] == sorted(told["text_offset"])
    for offset, token in zip(told["text_offset"], told["tokens"], strict=True):
        assert token == "\ufffd" or whole["text"][offset:].startswith(token)
    members = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
    assert {name: joined([one[name] for one in members]) for name in told} == told


def test_a_prompts_token_that_is_likely_has_its_rank(tokenizer: Tokenizer) -> None:
    place = by_token_id(tokenizer.text, 6, found(6, 5, 6, 7), 2)
    ranks: Any = dict(place)
    assert {token_id: told["rank"] for token_id, told in ranks.items()} == {"6": 2, "5": 1}


def test_a_log_probability_of_nought_is_a_number(tokenizer: Tokenizer) -> None:
    """JSON knows no infinity."""
    never = TokenLogprobs(-math.inf, (5,), (-math.inf,))
    for form in (CHAT, COMPLETION):
        writer = form.logprobs_of(tokenizer.text)
        writer.add([5], [never])
        assert "-9999.0" in json.dumps(writer.take(), allow_nan=False)


def test_usage_may_come_along() -> None:
    events = events_of(["a", "b"])
    events[0] = Started("r", "m", 0, (1, 2, 3, 4, 5))
    read = streamed(COMPLETION, events, includes_usage=True, counts_along=True)
    assert [piece["usage"]["completion_tokens"] for piece in read] == [1, 2, 2, 3]
    assert {piece["usage"]["prompt_tokens"] for piece in read} == {5}
    assert [bool(piece["choices"]) for piece in read] == [True, True, True, False]


def test_what_ends_a_stream_is_one_write() -> None:
    stream = StreamedAnswer(heading(CHAT), includes_usage=True)
    sent = [stream.send(event) for event in events_of(["a", "", "b"])]
    assert [bool(piece) for piece in sent] == [False, True, False, True, False, True]
    assert sent[-1].count(b"data: ") == 3


@pytest.mark.parametrize(("matched", "told"), [("stop", "stop"), (9, 9), (2, None), (None, None)])
def test_detail_11_only_what_the_client_named_is_a_stop_reason(
    matched: str | int | None, told: str | int | None
) -> None:
    events = events_of(["a"], FinishReason.STOP, matched)
    choice = whole(COMPLETION, events)["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", told)
    assert streamed(COMPLETION, events)[-1]["choices"][0]["stop_reason"] == told


STATUS_OF_CODE = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.INTERNAL: 500,
    grpc.StatusCode.FAILED_PRECONDITION: 500,
    grpc.StatusCode.PERMISSION_DENIED: 500,  # between workers: nothing that a client could help
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DATA_LOSS: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
OTHER_STATUSES = {  # where HTTP says more than gRPC's codes do
    "CLASS_NOT_ALLOWED": 403,
    "CLIENT_TOO_SLOW": 408,
    "BATCH_NOT_OPEN": 409,
    "FILE_TOO_LARGE": 413,
    "STORAGE_FULL": 413,
    "DISK_FULL": 507,
    "KV_TRANSFER_INTERRUPTED": 503,
    "MODEL_CHANGED": 503,
    "LEASE_EXPIRED": 503,
}


def test_every_reason_has_the_status_of_its_code() -> None:
    assert set(STATUSES) == set(all_reasons())
    expected = {
        reason: status for code, status in STATUS_OF_CODE.items() for reason in reasons_with(code)
    }
    assert {**expected, "INTERNAL": 500, **OTHER_STATUSES} == STATUSES


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (503, "service_unavailable_error"),
        (504, "timeout_error"),
    ],
)
def test_detail_18_each_status_has_openais_type(status: int, kind: str) -> None:
    content: Any = answer_to(RefusedError(status, "no", "code")).content
    assert content["error"]["type"] == kind


def test_detail_18_errors() -> None:
    cases: list[tuple[DiptychError | RefusedError, int, str, str | None, int | None]] = [
        (InvalidRequestError("is wrong", field="top_p"), 400, "request_invalid", "top_p", None),
        (ModelNotFoundError("no model"), 404, "model_not_found", "model", None),
        (QueueFullError("full", retry_after_s=2.1), 429, "queue_full", None, 3),
        (NoWorkerError("gone"), 503, "no_worker", None, 1),
        (RefusedError(413, "large", "request_too_large"), 413, "request_too_large", None, None),
        (DiptychError("x" * 5000), 500, "internal", None, None),
    ]
    for error, status, code, param, retry_after_s in cases:
        answer = answer_to(error)
        assert (answer.status, answer.retry_after_s) == (status, retry_after_s)
        content: Any = answer.content
        assert set(content["error"]) == {"message", "type", "param", "code"}
        assert (content["error"]["code"], content["error"]["param"]) == (code, param)
        assert len(content["error"]["message"]) <= 1024
    told: Any = bug("r").content
    assert told["error"]["message"] == "internal error in request r"


def test_who_would_be_late_at_any_time_is_not_told_to_come_back() -> None:
    assert answer_to(DeadlineUnreachableError("x", retry_after_s=None)).retry_after_s is None
    assert answer_to(DeadlineUnreachableError("x", retry_after_s=2.5)).retry_after_s == 3
    assert answer_to(QueueFullError("x", retry_after_s=None)).retry_after_s == 1

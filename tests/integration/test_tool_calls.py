"""Calls of tools, and responses, through a real cluster, by OpenAI's own client."""

import asyncio
import io
import json
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from diptych.cli import chat as chat_command
from diptych.cli import generate
from diptych.cli.conversation import Conversation
from diptych.client import (
    ChatMessage,
    Constraint,
    SamplingOptions,
    Tool,
    ToolChoice,
    Tools,
    build_request,
)
from diptych.errors import InvalidRequestError
from diptych.finish_reason import FinishReason
from tests.cluster import Cluster, running_cluster
from tests.integration.http_bodies import MESSAGES
from tests.integration.http_calls import chat
from tests.integration.offered_tools import TOOLS, tool

MAX_LEN = 600

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def folder(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with a template that tells of tools where there are some.

    Two special tokens that it has no use for are the marks of thoughts.
    """
    copied = shutil.copytree(tiny_llama, tmp_path_factory.mktemp("tools") / tiny_llama.name)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        said = (copied / name).read_text().replace("<pad>", "<think>")
        (copied / name).write_text(said.replace("<bos>", "</think>"))
    settings = json.loads((copied / "tokenizer_config.json").read_text())
    names = "{{ tools | map(attribute='function.name') | join(' ') }}"
    known = f"{{% if tools %}}<turn>tools\n{names}<end>\n{{% endif %}}"
    thinks = "{% if think %}<|im_start|>assistant\n<think>{% endif %}"
    dated = "{% if is_dated %}{{ strftime_now('%s') }}{% endif %}"
    settings["chat_template"] = known + dated + settings["chat_template"] + thinks
    (copied / "tokenizer_config.json").write_text(json.dumps(settings))
    return Path(copied)


@pytest.fixture(scope="module")
def cluster(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(
        tmp_path_factory.mktemp("calls"),
        str(folder),
        worker_flags={"num-blocks": "128", "max-model-len": str(MAX_LEN)},
        router_flags={
            "local-prefill-below-tokens": "0",
            "answer-form": "hermes",
        },
    ) as running:
        yield running


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> str:
    return tiny_llama.name


ONE_CALL: dict[str, Any] = {
    "tools": TOOLS,
    "parallel_tool_calls": False,
    "temperature": 1,
    "seed": 5,
    "max_completion_tokens": 150,
    "extra_body": {},
}


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "clock"}}]
)
async def test_calls_that_a_client_insists_on(
    openai_client: openai.AsyncOpenAI, model: str, choice: Any
) -> None:
    """One call that fits its schema, the same whole and streamed, which may be answered."""
    asked = {**ONE_CALL, "tool_choice": choice}
    whole = await chat(openai_client, model, **asked)
    (said,) = whole.choices
    assert (said.finish_reason, said.message.content) == ("tool_calls", None)
    assert said.message.tool_calls is not None
    (call,) = said.message.tool_calls
    assert call.type == "function"
    names = {"weather", "clock"} if choice == "required" else {"clock"}
    assert call.function.name in names
    members = {"weather": {"city", "days"}, "clock": {"is_utc"}}[call.function.name]
    assert set(json.loads(call.function.arguments)) == members
    stream: Any = await chat(openai_client, model, **asked, stream=True)
    chunks = [chunk.choices[0] async for chunk in stream]
    assert chunks[-1].finish_reason == "tool_calls"
    parts = [part for chunk in chunks for part in chunk.delta.tool_calls or ()]
    assert "".join(part.function.arguments for part in parts) == call.function.arguments
    assert [part.function.name for part in parts if part.function.name] == [call.function.name]
    answer = {"role": "tool", "tool_call_id": call.id, "content": "ok"}
    turns = [*MESSAGES, said.message.model_dump(exclude_none=True), answer]
    after = await chat(openai_client, model, messages=turns, tools=TOOLS, max_tokens=3)
    before = await chat(openai_client, model, tools=TOOLS, max_tokens=3)
    assert after.usage is not None
    assert before.usage is not None
    assert after.usage.prompt_tokens > before.usage.prompt_tokens


WEATHER = TOOLS[0]["function"]["parameters"]
HELD: list[tuple[dict[str, Any], Any]] = [
    ({"guided_json": WEATHER}, lambda text: set(json.loads(text)) == {"city", "days"}),
    ({"guided_regex": "[a-f]{3}-[0-9]{2}"}, re.compile(r"[a-f]{3}-\d{2}").fullmatch),
    ({"guided_choice": ["up", "down"]}, ["up", "down"].__contains__),
    ({"guided_grammar": 'start: "q" "r"+ "s"'}, re.compile("qr+s").fullmatch),
]
# The marks are of the likeliest where they are admitted, so that the random model thinks briefly.
THINKING: dict[str, Any] = {"logit_bias": {"0": 100, "1": 6}, "temperature": 1, "n": 2}


@pytest.mark.parametrize("is_begun", [True, False])
async def test_detail_25_a_form_is_for_the_answer_and_not_for_thoughts(
    openai_client: openai.AsyncOpenAI, model: str, is_begun: bool
) -> None:
    """Whether the prompt begins them or the model does; whole and streamed, each choice."""
    for seed, (said, fits) in enumerate(HELD):
        extra = {"chat_template_kwargs": {"think": is_begun}, "seed": seed, **said}
        asked = {**THINKING, "extra_body": extra, "max_tokens": 200}
        whole = await chat(openai_client, model, **asked)
        for choice in whole.choices:
            assert choice.finish_reason == "stop"
            assert choice.message.content is not None
            assert fits(choice.message.content), choice.message.content
            assert getattr(choice.message, "reasoning_content", None), "it thought"
        stream: Any = await chat(openai_client, model, **asked, stream=True)
        streamed = {0: ["", ""], 1: ["", ""]}
        async for chunk in stream:
            for part in chunk.choices:
                streamed[part.index][0] += part.delta.content or ""
                streamed[part.index][1] += getattr(part.delta, "reasoning_content", None) or ""
        for choice in whole.choices:
            message: Any = choice.message
            assert streamed[choice.index] == [message.content, message.reasoning_content]


async def test_detail_25_calls_that_a_client_insists_on_come_behind_thoughts(
    openai_client: openai.AsyncOpenAI, model: str
) -> None:
    asked = {**THINKING, "n": 1, "tools": TOOLS, "tool_choice": "required", "max_tokens": 200}
    for is_begun in (True, False):
        extra = {"chat_template_kwargs": {"think": is_begun}, "seed": 5}
        (choice,) = (await chat(openai_client, model, **asked, extra_body=extra)).choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert choice.message.tool_calls
        assert getattr(choice.message, "reasoning_content", None)


async def test_detail_25_an_answer_behind_thoughts_goes_on_where_it_broke_off(
    cluster: Cluster,
) -> None:
    """Amid thoughts, at their end, amid the answer: the same tokens, said as what they are."""
    options = SamplingOptions(
        constraint=Constraint.json_schema(WEATHER),
        seed=7,
        max_tokens=200,
        logit_bias={0: 100, 1: 6},
    )
    turns = [ChatMessage("user", "What is the weather?")]
    async with cluster.client() as client:
        request = build_request(messages=turns, options=options)
        chunks = [chunk async for chunk in client.stream(request)]
        whole = [token_id for chunk in chunks for token_id in chunk.token_ids]
        end = whole.index(1)
        assert set(json.loads("".join(chunk.text for chunk in chunks))) == {"city", "days"}
        assert whole[0] == 0
        for cut in (1, end, end + 1, end + 2, len(whole) - 1):
            again = build_request(messages=turns, options=options, emitted_token_ids=whole[:cut])
            rest = [chunk async for chunk in client.stream(again)]
            assert whole[:cut] + [each for chunk in rest for each in chunk.token_ids] == whole
            assert any(chunk.reasoning for chunk in rest) <= (cut <= end)
        wrong = build_request(messages=turns, options=options, emitted_token_ids=[*whole[:-2], 1])
        with pytest.raises(InvalidRequestError) as caught:
            await anext(client.stream(wrong))
    assert caught.value.field == "emitted_token_ids"


async def test_with_a_form_an_answer_is_that_or_calls(
    cluster: Cluster, openai_client: openai.AsyncOpenAI, model: str
) -> None:
    """As the model likes; here it is told by biases. Whole, and where it broke off."""
    asked = {"tools": TOOLS, "max_tokens": 200, "temperature": 1}
    extra = {"guided_json": WEATHER, "seed": 5}
    bias = {"0": -100}  # no thoughts

    async def choice(**biases: float) -> Any:
        (said,) = (
            await chat(
                openai_client, model, **asked, extra_body=extra, logit_bias={**bias, **biases}
            )
        ).choices
        return said

    async with cluster.client() as client:
        (less,), (brace,) = await client.tokenize("<"), await client.tokenize("{")
        answer = await choice(**{str(brace): 100})
        assert set(json.loads(answer.message.content)) == {"city", "days"}
        assert (answer.finish_reason, answer.message.tool_calls) == ("stop", None)
        call = '<tool_call>{"name": "clock", "arguments": {"is_utc": true}}'
        turns = [ChatMessage("user", "What time is it?")]
        request = build_request(
            messages=turns,
            options=SamplingOptions(
                constraint=Constraint.json_schema(WEATHER),
                seed=7,
                logit_bias={2: 100},
                max_tokens=200,
            ),
            tools=Tools([Tool("clock", "the time", TOOLS[1]["function"]["parameters"])]),
            emitted_token_ids=await client.tokenize(call),
        )
        chunks = [chunk async for chunk in client.stream(request)]
    (called,) = (call for chunk in chunks for call in chunk.tool_calls)
    assert (called.name, called.arguments) == ("clock", '{"is_utc": true}')
    assert chunks[-1].finish_reason is FinishReason.TOOL_CALLS
    begun = await choice(**{str(less): 100})
    assert (begun.message.content or "").startswith(
        "<tool_call>"
    ) or begun.message.tool_calls is not None


async def test_a_chat_that_goes_on_later_has_the_same_prompt(cluster: Cluster) -> None:
    """Where its template says the time: it is that of its begin, which Started tells."""
    asked: dict[str, Any] = {
        "messages": [ChatMessage("user", "What time is it?")],
        "template_arguments": {"is_dated": True},
        "options": SamplingOptions(temperature=1, seed=3, max_tokens=24),
        "return_prompt_token_ids": True,
    }
    async with cluster.client() as client:
        whole = [chunk async for chunk in client.stream(build_request(**asked))]
        now_unix_s, prompt = whole[0].now_unix_s, whole[0].prompt_token_ids
        ids = [token_id for chunk in whole for token_id in chunk.token_ids]
        assert 0 <= time.time() - now_unix_s < 60
        assert str(now_unix_s) in await client.detokenize(prompt)
        while int(time.time()) == now_unix_s:
            await asyncio.sleep(0.05)
        (other,) = {chunk.prompt_token_ids async for chunk in client.stream(build_request(**asked))}
        assert other != prompt
        again = build_request(**asked, emitted_token_ids=ids[:9], now_unix_s=now_unix_s)
        rest = [chunk async for chunk in client.stream(again)]
    assert rest[0].prompt_token_ids == prompt
    assert ids[:9] + [token_id for chunk in rest for token_id in chunk.token_ids] == ids


async def test_the_python_client_offers_tools_and_answers_calls(cluster: Cluster) -> None:
    """By gRPC: the same as over HTTP."""
    schema = TOOLS[1]["function"]["parameters"]
    tools = Tools([Tool("clock", "the time", schema)], ToolChoice.REQUIRED, is_parallel=False)
    options = SamplingOptions(seed=5, max_tokens=150)
    turns = [ChatMessage("user", "What time is it?")]
    async with cluster.client() as client:
        request = build_request(messages=turns, options=options, tools=tools)
        chunks = [chunk async for chunk in client.stream(request)]
        (call,) = (call for chunk in chunks for call in chunk.tool_calls)
        assert (call.name, set(json.loads(call.arguments))) == ("clock", {"is_utc"})
        assert chunks[-1].finish_reason is FinishReason.TOOL_CALLS
        turns += [
            ChatMessage("assistant", "", tool_calls=[call]),
            ChatMessage("tool", "noon", tool_call_id=call.id),
        ]
        after = build_request(
            messages=turns, options=SamplingOptions(max_tokens=2), tools=Tools(tools.tools)
        )
        last = [chunk async for chunk in client.stream(after)][-1]
    assert last.usage is not None
    assert chunks[-1].usage is not None
    assert last.usage.num_prompt_tokens > chunks[-1].usage.num_prompt_tokens


async def test_people_are_shown_calls_and_answer_them(
    cluster: Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By ``diptych generate`` and in a ``diptych chat``, whose next line is the call's answer."""
    path = tmp_path / "tools.json"
    path.write_text(json.dumps(TOOLS[1:]))
    flags = ["--address", cluster.router.address, "--tools", str(path)]
    flags += ["--max-tokens", "60", "--seed", "5", "--logit-bias", "0=-100"]
    required = [*flags, "--tool-choice", "required"]
    assert await asyncio.to_thread(generate.run, [*required, "What time is it?"]) == 0
    shown = capsys.readouterr().out.splitlines()
    arguments = json.loads(shown[0].removeprefix("clock(").removesuffix(")"))
    assert arguments in ({"is_utc": True}, {"is_utc": False}), shown
    conversations: list[Conversation] = []

    def remembered(*args: Any) -> Conversation:
        conversations.append(Conversation(*args))
        return conversations[0]

    monkeypatch.setattr("diptych.cli.chat.Conversation", remembered)
    monkeypatch.setattr(
        sys, "stdin", io.StringIO("What time is it?\n" + "noon\n" * len(shown[:-1]))
    )
    assert await asyncio.to_thread(chat_command.run, required) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.splitlines()[: len(shown) - 1] == shown[:-1]
    turns = conversations[0].request("and now?").chat.messages
    num_calls = len(turns[1].tool_calls)
    assert [turn.role for turn in turns[:2]] == ["user", "assistant"]
    assert [turn.role for turn in turns[2 : 2 + num_calls]] == ["tool"] * num_calls
    assert [turn.content[0].text for turn in turns[2 : 2 + num_calls]] == ["noon"] * num_calls
    path.write_text("[{}]")
    assert await asyncio.to_thread(generate.run, [*flags, "Hello"]) == 1
    assert "--tools" in capsys.readouterr().err


async def test_tools_are_told_of_unless_none_may_be_called(
    openai_client: openai.AsyncOpenAI, model: str
) -> None:
    counts = []
    asks: list[dict[str, Any]] = [{}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}]
    for asked in asks:
        answered = await chat(openai_client, model, **asked, max_tokens=1)
        assert answered.usage is not None
        counts.append(answered.usage.prompt_tokens)
    assert counts[0] == counts[2] < counts[1]


async def test_bad_tools_are_named(openai_client: openai.AsyncOpenAI, model: str) -> None:
    twice = {"tools": [TOOLS[0], TOOLS[0]]}
    hopeless = {"tools": [*TOOLS, tool("f", x={"not": {}})], "tool_choice": "required"}
    unknown = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}
    for asked, param in (
        (twice, "tools[1].function.name"),
        (hopeless, "tools"),
        (unknown, "tool_choice.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await chat(openai_client, model, **{**asked, "extra_body": {}})
        assert caught.value.param == param
        assert asked is not hopeless or "f: failed to compile" in caught.value.message


# What the Responses API says of the same functions, turns and samples.
TURNS: Any = MESSAGES[-1:]
FLAT_TOOLS: list[Any] = [{"type": "function", **each["function"]} for each in TOOLS]
SAMPLED: dict[str, Any] = {"temperature": 0.9, "max_output_tokens": 30}


async def respond(openai_client: openai.AsyncOpenAI, model: str, **settings: Any) -> Response:
    asked = {"input": TURNS, "extra_body": {"seed": 5}, **SAMPLED, **settings}
    made: Response = await openai_client.responses.create(model=model, **asked)
    return made


async def test_a_response_is_what_a_chat_answers(
    openai_client: openai.AsyncOpenAI, model: str
) -> None:
    """Cut off, and told of with its tokens' log probabilities and what was asked."""
    said = await chat(
        openai_client, model, messages=TURNS, temperature=0.9, max_tokens=30, seed=5,
        extra_body={}, logprobs=True,
    )  # fmt: skip
    include = ["message.output_text.logprobs"]
    answer = await respond(openai_client, model, include=include, metadata={"a": "b"})
    assert answer.output_text == said.choices[0].message.content
    assert (answer.status, answer.metadata) == ("incomplete", {"a": "b"})
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert said.usage is not None
    assert answer.usage.input_tokens == said.usage.prompt_tokens
    assert answer.usage.output_tokens == 30
    (item,) = answer.output
    assert item.type == "message"
    (part,) = item.content
    assert part.type == "output_text"
    assert said.choices[0].logprobs is not None
    expected = [entry.logprob for entry in said.choices[0].logprobs.content or []]
    assert [entry.logprob for entry in part.logprobs or []] == expected


async def test_a_streamed_response_is_the_whole_one(
    openai_client: openai.AsyncOpenAI, model: str
) -> None:
    """With thoughts that never end, which the chat template began."""
    thinking = {"seed": 5, "chat_template_kwargs": {"think": True}}
    for extra in ({"seed": 5}, thinking):
        whole = await respond(openai_client, model, extra_body=extra)
        stream: Any = await respond(openai_client, model, extra_body=extra, stream=True)
        events: list[Any] = [event async for event in stream]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        last = events[-1]
        assert last.type == "response.incomplete"
        (item,), (expected,) = last.response.output, list(whole.output)
        assert item.type == ("reasoning" if extra is thinking else "message")
        assert item.model_dump(exclude={"id"}) == expected.model_dump(exclude={"id"})
        (part,) = item.content
        deltas = [event.delta for event in events if event.type.endswith("_text.delta")]
        assert "".join(deltas) == part.text
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens == 30


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


async def test_a_response_fits_the_form_that_a_client_parses(
    openai_client: openai.AsyncOpenAI, model: str
) -> None:
    asked: dict[str, Any] = {"input": "And then?", "text_format": Weather, "temperature": 1}
    parsed = await openai_client.responses.parse(model=model, **asked, extra_body={"seed": 5})
    assert (parsed.status, type(parsed.output_parsed)) == ("completed", Weather)
    async with openai_client.responses.stream(
        model=model, **asked, extra_body={"seed": 5}
    ) as stream:
        final = await stream.get_final_response()
    assert final.output_parsed == parsed.output_parsed
    assert final.usage is not None
    assert parsed.usage is not None
    assert final.usage.output_tokens == parsed.usage.output_tokens


async def test_a_response_calls_and_is_answered(
    openai_client: openai.AsyncOpenAI, model: str
) -> None:
    """All that it said goes back as it came, with what the tool answered."""
    only = {"type": "allowed_tools", "mode": "required", "tools": FLAT_TOOLS[1:]}
    asked: dict[str, Any] = {
        "tools": FLAT_TOOLS,
        "tool_choice": only,
        "parallel_tool_calls": False,
        "max_output_tokens": 150,
    }
    first = await respond(openai_client, model, **asked)
    (call,) = first.output
    assert call.type == "function_call"
    assert (call.name, set(json.loads(call.arguments))) == ("clock", {"is_utc"})
    async with openai_client.responses.stream(
        model=model, input=TURNS, extra_body={"seed": 5}, temperature=0.9, **asked
    ) as stream:
        told: list[Any] = [event async for event in stream]
        final = await stream.get_final_response()
    assert [event.delta for event in told if event.type.endswith("arguments.delta")] == [
        call.arguments
    ]
    (streamed,) = final.output
    assert streamed.type == "function_call"
    assert streamed.arguments == call.arguments
    answer = {"type": "function_call_output", "call_id": call.call_id, "output": "ok"}
    turns = [*TURNS, call.model_dump(exclude_none=True), answer]
    after = await respond(openai_client, model, input=turns, tools=FLAT_TOOLS)
    before = await respond(openai_client, model, tools=FLAT_TOOLS)
    assert after.usage is not None
    assert before.usage is not None
    assert after.usage.input_tokens > before.usage.input_tokens


async def test_a_response_that_cannot_be_made_is_refused_by_name(
    openai_client: openai.AsyncOpenAI, model: str
) -> None:
    empty = {"type": "function_call", "call_id": "1", "name": "", "arguments": "{}"}
    for asked, param in (
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"max_output_tokens": MAX_LEN}, "max_output_tokens"),
        ({"input": [{"role": "user", "content": "bright " * MAX_LEN}]}, "input"),
        ({"input": [{"role": "user", "content": "a"}, empty]}, "input[1].name"),
        ({"instructions": "i", "tool_choice": "required"}, "tool_choice"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await respond(openai_client, model, **asked)
        assert caught.value.param == param

"""Whatever body the HTTP front end gets, it answers with a type, and nobody else is disturbed.

Ten thousand bodies with ``--hypothesis-profile long``.
"""

import asyncio
import json
import logging
import random
from collections import Counter
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from hypothesis import settings

from tests.integration.odd_bodies import OddBody, odd_body
from tests.integration.router_rig import PATIENT, PROMPT, serving
from tests.notes import Note

IS_LONG = settings.get_current_profile_name() == "long"
NUM_BODIES = 10_000 if IS_LONG else 200
NUM_AT_ONCE = 8
NEIGHBOUR_EACH = 20  # bodies
REFUSALS: Final = {400, 404, 413, 415}
OURS: Final = ("router", "diptych", "batch_server")  # loggers: what crashes is told of there

COMPLETION = {"prompt": "The quiet garden", "max_tokens": 3}
MESSAGES = [
    {"role": "system", "content": "Say little."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "it?"}],
    },
]
CALL = {"id": "c", "type": "function", "function": {"name": "clock", "arguments": '{"utc": true}'}}
CALLED = [
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "noon"},
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CHAT = {"messages": MESSAGES, "max_tokens": 3}
RESPONSES: Final = "/v1/responses"
RESPONSE = {"input": "What is it?", "max_output_tokens": 3}
ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello."}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "A greeting."}]},
    {"type": "function_call", "call_id": "c", "name": "clock", "arguments": '{"utc": true}'},
    {"type": "function_call_output", "call_id": "c", "output": "noon"},
]
GOOD: Final[list[tuple[str, dict[str, Any]]]] = [
    ("/v1/completions", {**COMPLETION, "temperature": 0.5, "top_p": 0.9, "seed": 7, "n": 2}),
    ("/v1/completions", {**COMPLETION, "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {**COMPLETION, "echo": True, "logprobs": 2, "return_timing": True}),
    ("/v1/completions", {**COMPLETION, "prompt": [5, 6, 7], "stop": ["a", "b"], "min_tokens": 1}),
    ("/v1/completions", {**COMPLETION, "logit_bias": {"5": 1.5}, "bad_words": ["a"], "top_k": 5}),
    (
        "/v1/completions",
        {**COMPLETION, "stop_token_ids": [9], "presence_penalty": 0.5, "min_p": 0.1},
    ),
    ("/v1/completions", {**COMPLETION, "prompt_logprobs": 1, "priority": "batch", "ttft_ms": 9e5}),
    ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2, "user": "me"}),
    ("/v1/chat/completions", {**CHAT, "stream": True, "n": 2, "cache_salt": "s"}),
    ("/v1/chat/completions", {**CHAT, "messages": [*MESSAGES, *CALLED], "stop": "x"}),
    (
        "/v1/chat/completions",
        {**CHAT, "chat_template_kwargs": {"a": [1]}, "max_completion_tokens": 2},
    ),
    (RESPONSES, {**RESPONSE, "instructions": "Say little.", "temperature": 0.5, "top_p": 0.9}),
    (RESPONSES, {**RESPONSE, "stream": True, "metadata": {"a": "b"}, "text": {"format": None}}),
    (RESPONSES, {**RESPONSE, "input": ITEMS, "reasoning": {"effort": None}, "store": False}),
    (RESPONSES, {**RESPONSE, "include": ["message.output_text.logprobs"], "top_logprobs": 2}),
    ("/v1/embeddings", {"input": ["a", "b c"], "encoding_format": "base64", "dimensions": 4}),
    ("/v1/embeddings", {"input": [5, 6], "pooling": "mean", "normalize": False}),
    ("/score", {"prompt": "The", "continuations": ["a", [5, 6]]}),
    ("/score", {"text_1": "a", "text_2": ["b"]}),
    ("/rerank", {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}),
    ("/tokenize", {"prompt": "The quiet garden"}),
    ("/tokenize", {"messages": MESSAGES, "chat_template_kwargs": {}}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
]
# Each costs its compiler's process milliseconds, and may end it.
CONSTRAINED: Final[list[tuple[str, dict[str, Any]]]] = [
    (
        "/v1/chat/completions",
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    ),
    ("/v1/completions", {**COMPLETION, "structured_outputs": {"regex": "[a-c]{3}"}}),
    ("/v1/completions", {**COMPLETION, "guided_choice": ["yes", "no"]}),
]


async def test_detail_18_every_body_gets_a_typed_answer(
    tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, note: Note
) -> None:
    seen: Counter[int] = Counter()
    turns = iter(range(NUM_BODIES))
    with caplog.at_level(logging.ERROR):
        async with serving(tiny_llama, tmp_path, PATIENT, max_request_bytes=65_536) as (
            cluster,
            client,
        ):
            cluster.decode[0].behaviour.tokens_per_step = 32
            undisturbed = await neighbour(client, tiny_llama.name)

            async def send_some() -> None:
                for turn in turns:
                    rng = random.Random(turn)
                    path, good = rng.choice(CONSTRAINED if turn % 25 == 0 else GOOD)
                    odd = odd_body(rng, {"model": tiny_llama.name, **good})
                    answer = await client.post(path, content=odd.data, headers=odd.headers)
                    check(answer, odd, path, f"body {turn} to {path}")
                    seen[answer.status_code] += 1
                    if turn % NEIGHBOUR_EACH == 0:
                        await cluster.generate(timeout_s=100)
                        assert await neighbour(client, tiny_llama.name) == undisturbed

            async with asyncio.TaskGroup() as tasks:
                for _ in range(NUM_AT_ONCE):
                    tasks.create_task(send_some())
            assert (await client.get("/health")).status_code == 200
    ours = [each for each in caplog.records if each.name.startswith(OURS)]
    assert not ours, [vars(record) for record in ours]
    note(f"{seen.total()} bodies over HTTP: {dict(sorted(seen.items()))}")
    assert seen[200] > NUM_BODIES // 20
    assert seen[400] > NUM_BODIES // 4


def check(answer: httpx.Response, odd: OddBody, path: str, what: str) -> None:
    """It is an answer, or a refusal with a type that names what is wrong."""
    said = f"{what}: {answer.status_code} {answer.text[:500]} to {odd.data[:2000]!r}, {odd.headers}"
    assert answer.headers["x-request-id"], said
    if answer.status_code == 200 and path == RESPONSES:
        check_response(answer, said)
        return
    if answer.status_code == 200:
        if answer.headers["content-type"].startswith("text/event-stream"):
            assert answer.text.endswith("data: [DONE]\n\n"), said
            assert '"error"' not in answer.text, said
        else:
            assert "error" not in answer.json(), said
        return
    assert answer.status_code in REFUSALS, said
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}, said
    assert error["message"], said
    assert bool(error["param"]) == (answer.status_code in (400, 404)), said


def check_response(answer: httpx.Response, said: str) -> None:
    """It ended well, whether it came as events or as an object."""
    if answer.headers["content-type"].startswith("text/event-stream"):
        last = json.loads(answer.text.strip().rsplit("\ndata: ", 1)[1])
        assert last["type"] == f"response.{last['response']['status']}", said
        response = last["response"]
    else:
        response = answer.json()
    assert response["status"] in ("completed", "incomplete"), said
    assert response["error"] is None, said


async def neighbour(client: httpx.AsyncClient, model: str) -> Any:
    """What a good request is answered."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 4, "ignore_eos": True, "logprobs": 0}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]

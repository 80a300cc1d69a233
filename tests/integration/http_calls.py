"""One call over HTTP, by OpenAI's client or raw, and the same over gRPC."""

import json
from typing import Any

import httpx
import openai
from openai.types import Completion
from openai.types.chat import ChatCompletion

from diptych.client import SamplingOptions
from tests.cluster import Cluster
from tests.integration.http_bodies import MESSAGES

PROMPT = "The small river carries another letter, and then"
GO_ON = {"ignore_eos": True}  # a name of ours that OpenAI's client does not know


async def by_grpc(cluster: Cluster, options: SamplingOptions, **prompt: Any) -> str:
    async with cluster.client() as grpc:
        return "".join([chunk.text async for chunk in grpc.generate(options=options, **prompt)])


async def complete(client: openai.AsyncOpenAI, model: str, **settings: Any) -> Completion:
    given = {"prompt": PROMPT, "temperature": 0, "extra_body": GO_ON, **settings}
    made: Completion = await client.completions.create(model=model, **given)
    return made


async def chat(client: openai.AsyncOpenAI, model: str, **settings: Any) -> ChatCompletion:
    given = {"messages": MESSAGES, "temperature": 0, "extra_body": GO_ON, **settings}
    made: ChatCompletion = await client.chat.completions.create(model=model, **given)
    return made


async def events(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream as they are, less the last, which has to be [DONE]."""
    async with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        read = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert read[-1] == "[DONE]"
    return [json.loads(event) for event in read[:-1]]


def body_of(model: str, **settings: Any) -> dict[str, Any]:
    return {"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": 12, **settings}

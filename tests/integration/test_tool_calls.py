"""Calls of tools through a real cluster, by OpenAI's own client."""

import json
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from tests.cluster import Cluster, running_cluster
from tests.integration.http_bodies import MESSAGES
from tests.integration.http_calls import chat

MAX_LEN = 600

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def folder(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with a template that tells of tools where there are some."""
    copied = shutil.copytree(tiny_llama, tmp_path_factory.mktemp("tools") / tiny_llama.name)
    settings = json.loads((copied / "tokenizer_config.json").read_text())
    names = "{{ tools | map(attribute='function.name') | join(' ') }}"
    known = f"{{% if tools %}}<turn>tools\n{names}<end>\n{{% endif %}}"
    settings["chat_template"] = known + settings["chat_template"]
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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    await cluster.wait_ready()
    url = f"http://{cluster.router.http_address}"
    async with httpx.AsyncClient(base_url=url, timeout=60) as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(http: httpx.AsyncClient) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{http.base_url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as opened:
        yield opened


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
    }
    parameters["additionalProperties"] = False
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("weather", city={"enum": ["Paris", "Rome"]}, days={"enum": [1, 2, 3]}),
    tool("clock", is_utc={"type": "boolean"}),
]


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
    client: openai.AsyncOpenAI, model: str, choice: Any
) -> None:
    """One call that fits its schema, the same whole and streamed, which may be answered."""
    asked = {**ONE_CALL, "tool_choice": choice}
    whole = await chat(client, model, **asked)
    (said,) = whole.choices
    assert (said.finish_reason, said.message.content) == ("tool_calls", None)
    assert said.message.tool_calls is not None
    (call,) = said.message.tool_calls
    assert call.type == "function"
    names = {"weather", "clock"} if choice == "required" else {"clock"}
    assert call.function.name in names
    members = {"weather": {"city", "days"}, "clock": {"is_utc"}}[call.function.name]
    assert set(json.loads(call.function.arguments)) == members
    stream: Any = await chat(client, model, **asked, stream=True)
    chunks = [chunk.choices[0] async for chunk in stream]
    assert chunks[-1].finish_reason == "tool_calls"
    parts = [part for chunk in chunks for part in chunk.delta.tool_calls or ()]
    assert "".join(part.function.arguments for part in parts) == call.function.arguments
    assert [part.function.name for part in parts if part.function.name] == [call.function.name]
    answer = {"role": "tool", "tool_call_id": call.id, "content": "ok"}
    turns = [*MESSAGES, said.message.model_dump(exclude_none=True), answer]
    after = await chat(client, model, messages=turns, tools=TOOLS, max_tokens=3)
    before = await chat(client, model, tools=TOOLS, max_tokens=3)
    assert after.usage is not None
    assert before.usage is not None
    assert after.usage.prompt_tokens > before.usage.prompt_tokens


async def test_tools_are_told_of_unless_none_may_be_called(
    client: openai.AsyncOpenAI, model: str
) -> None:
    counts = []
    asks: list[dict[str, Any]] = [{}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}]
    for asked in asks:
        answered = await chat(client, model, **asked, max_tokens=1)
        assert answered.usage is not None
        counts.append(answered.usage.prompt_tokens)
    assert counts[0] == counts[2] < counts[1]


async def test_bad_tools_are_named(client: openai.AsyncOpenAI, model: str) -> None:
    twice = {"tools": [TOOLS[0], TOOLS[0]]}
    hopeless = {"tools": [tool("f", x={"not": {}})], "tool_choice": "required"}
    unknown = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}
    for asked, param in (
        (twice, "tools[1].function.name"),
        (hopeless, "tools"),
        (unknown, "tool_choice.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await chat(client, model, **{**asked, "extra_body": {}})
        assert caught.value.param == param

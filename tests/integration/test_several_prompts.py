"""Several prompts of one body, through a real cluster: each is answered as if it were alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.cluster import Cluster, running_cluster
from tests.integration.http_calls import GO_ON, PROMPT, complete

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def cluster(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(
        tmp_path_factory.mktemp("prompts"),
        str(tiny_llama),
        worker_flags={"num-blocks": "128", "max-model-len": "600"},
        router_flags={"local-prefill-below-tokens": "0"},
    ) as running:
        yield running


async def test_several_prompts_are_each_answered_as_if_alone(
    openai_client: openai.AsyncOpenAI, tiny_llama: Path
) -> None:
    """Prompt i has the choices from i * n on, whole and streamed; usage is of all."""
    model = tiny_llama.name
    prompts: list[Any] = [PROMPT, "The quiet garden opens", "In 1900"]
    asked: dict[str, Any] = {
        "n": 2, "max_tokens": 6, "temperature": 1, "seed": 3, "logprobs": 1, "extra_body": GO_ON
    }  # fmt: skip
    alone = [await complete(openai_client, model, prompt=each, **asked) for each in prompts]
    expected = [choice for each in alone for choice in each.choices]
    whole = await complete(openai_client, model, prompt=prompts, **asked)
    assert [choice.index for choice in whole.choices] == list(range(6))
    for choice, one in zip(whole.choices, expected, strict=True):
        assert choice.model_copy(update={"index": one.index}) == one
    assert whole.usage is not None
    used = [each.usage for each in alone if each.usage is not None]
    assert whole.usage.total_tokens == sum(each.total_tokens for each in used)
    options: Any = {"include_usage": True}
    stream: Any = await complete(
        openai_client, model, prompt=prompts, **asked, stream=True, stream_options=options
    )
    texts = dict.fromkeys(range(6), "")
    async for piece in stream:
        for choice in piece.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [choice.text for choice in expected]
    assert piece.choices == []
    assert piece.usage.total_tokens == whole.usage.total_tokens
    echoed = await complete(
        openai_client, model, prompt=prompts, max_tokens=0, echo=True, logprobs=0, extra_body={}
    )
    assert [choice.text for choice in echoed.choices] == prompts
    assert echoed.usage is not None
    assert echoed.usage.completion_tokens == 0

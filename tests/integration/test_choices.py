"""Several choices of one prompt, through a real cluster: each is what it would be alone.

So is every pair of options: what a hand-off makes of it, one process makes.
"""

import asyncio
import itertools
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.client import Chunk, Constraint, DiptychClient, SamplingOptions, build_request
from diptych.errors import InvalidRequestError
from diptych.token_logprobs import TokenLogprobs
from diptych.v1 import inference_pb2
from tests.cluster import Cluster, Process, another_router, running_cluster
from tests.integration.conftest import BLOCK_SIZE
from tests.prompts import prompt

pytestmark = pytest.mark.asyncio(loop_scope="module")

IS_LONG = settings.get_current_profile_name() == "long"
NUM_PAIRS = 300 if IS_LONG else 6
NUM_TOKENS = 12
CLOSE = 1e-4
PROMPT = prompt(100, seed=7)
OPTIONS = SamplingOptions(
    temperature=1.5, seed=2**64 - 2, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1
)


@pytest.fixture(scope="module")
def cluster(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(
        tmp_path_factory.mktemp("choices"),
        str(tiny_llama),
        worker_flags={"num-blocks": "64", "max-model-len": "256"},
        # A worker that answers slowly is not given up for another, which would compute again.
        router_flags={"local-prefill-below-tokens": "0", "timers.accept-s": "5"},
    ) as running:
        yield running


async def ask(client: DiptychClient, options: SamplingOptions, salt: str = "") -> list[Chunk]:
    request = build_request(token_ids=PROMPT, options=options, cache_salt=salt)
    return [chunk async for chunk in client.stream(request, 60.0)]


def by_choice(chunks: Sequence[Chunk]) -> dict[int, list[int]]:
    made: dict[int, list[int]] = defaultdict(list)
    for chunk in chunks:
        made[chunk.choice] += chunk.token_ids
    return made


def counted(worker: Process, name: str) -> float:
    return worker.metric(f"diptych_{name}")


async def test_detail_17_each_choice_has_the_next_seed_and_the_prompt_is_shared(
    client: DiptychClient, cluster: Cluster
) -> None:
    (prefill,), (decode,) = cluster.prefill, cluster.decode
    names = ((prefill, "engine_tokens_total"), (decode, "engine_tokens_total"))
    names += ((decode, "kv_pulls_total"),)  # type: ignore[assignment]
    before = [counted(*name) for name in names]
    chunks = await ask(client, replace(OPTIONS, n=3), salt="together")
    prefilled, decoded, pulls = (
        now - was for now, was in zip([counted(*name) for name in names], before, strict=True)
    )
    assert pulls == 1
    assert prefilled == len(PROMPT)
    rest = len(PROMPT) % BLOCK_SIZE  # behind the whole blocks
    assert decoded <= 3 * NUM_TOKENS + 2 * rest
    made = by_choice(chunks)
    for index in range(3):
        alone = replace(OPTIONS, seed=(2**64 - 2 + index) % 2**64)
        assert made[index] == by_choice(await ask(client, alone, salt=f"alone {index}"))[0]
    assert len({tuple(made[index]) for index in range(3)}) == 3
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.num_prompt_tokens, usage.num_output_tokens) == (100, 3 * NUM_TOKENS)
    ended = [chunk.choice for chunk in chunks if chunk.finish_reason is not None]
    assert sorted(ended) == [0, 1, 2]
    assert all(chunk.logprobs for chunk in chunks if chunk.token_ids)


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_short_choices_need_no_more(client: DiptychClient, max_tokens: int) -> None:
    options = replace(OPTIONS, max_tokens=max_tokens)
    made = by_choice(await ask(client, replace(options, n=4)))
    for index in range(4):
        alone = replace(options, seed=(2**64 - 2 + index) % 2**64)
        assert made[index] == by_choice(await ask(client, alone))[0]


async def test_choices_end_when_each_of_them_does(client: DiptychClient) -> None:
    whole = by_choice(await ask(client, replace(OPTIONS, n=2)))
    stop = next(token for token in whole[1][3:] if token not in whole[0])
    chunks = await ask(client, replace(OPTIONS, n=2, stop_token_ids=(stop,)))
    made = by_choice(chunks)
    assert made[0] == whole[0]
    assert made[1] == whole[1][: whole[1].index(stop) + 1]


async def test_detail_2_usage_sums_all_choices_whole_and_streamed(
    http: httpx.AsyncClient, client: DiptychClient, tiny_llama: Path
) -> None:
    body = {"model": tiny_llama.name, "prompt": PROMPT, "n": 3, "seed": 5, "temperature": 1.5}
    body |= {"max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 1}
    whole = (await http.post("/v1/completions", json=body)).json()
    texts = [choice["text"] for choice in whole["choices"]]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert all(len(each["logprobs"]["tokens"]) == NUM_TOKENS for each in whole["choices"])
    assert whole["usage"]["completion_tokens"] == 3 * NUM_TOKENS
    streamed, reasons = ["", "", ""], []
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert lines.pop() == "[DONE]"
    assert json.loads(lines.pop())["usage"]["completion_tokens"] == 3 * NUM_TOKENS
    for line in lines:
        (choice,) = json.loads(line)["choices"]
        streamed[choice["index"]] += choice["text"]
        reasons += [choice["index"]] if choice["finish_reason"] else []
    assert streamed == texts
    assert sorted(reasons) == [0, 1, 2]


async def test_the_best_of_several_are_the_likeliest_of_them(
    client: DiptychClient, http: httpx.AsyncClient, tiny_llama: Path
) -> None:
    """Each of them as it is without a choice; the tokens of all count."""
    chunks = await ask(client, replace(OPTIONS, n=5))
    made, logprobs = by_choice(chunks), defaultdict[int, list[float]](list)
    for chunk in chunks:
        logprobs[chunk.choice] += [found.logprob for found in chunk.logprobs]
    ranked = sorted(made, key=lambda index: -sum(logprobs[index]) / NUM_TOKENS)
    chosen = await ask(client, replace(OPTIONS, n=2, best_of=5, logprobs=None))
    assert by_choice(chosen) == {0: made[ranked[0]], 1: made[ranked[1]]}
    assert not any(chunk.logprobs for chunk in chosen)
    usage = chosen[-1].usage
    assert usage is not None
    assert usage.num_output_tokens == 5 * NUM_TOKENS
    body = {"model": tiny_llama.name, "prompt": PROMPT, "seed": OPTIONS.seed, "temperature": 1.5}
    body |= {"max_tokens": NUM_TOKENS, "ignore_eos": True, "best_of": 5, "logprobs": 1}
    (choice,) = (await http.post("/v1/completions", json=body)).json()["choices"]
    expected = logprobs[ranked[0]]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-5)
    refused = await http.post("/v1/completions", json={**body, "stream": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "best_of")


async def test_several_choices_cannot_be_resumed(client: DiptychClient) -> None:
    request = build_request(
        token_ids=PROMPT, options=replace(OPTIONS, n=2), emitted_token_ids=[5, 6]
    )
    with pytest.raises(InvalidRequestError) as caught:
        async for _ in client.stream(request):
            pass
    assert caught.value.field == "emitted_token_ids"


async def test_a_client_that_leaves_ends_all(client: DiptychClient, cluster: Cluster) -> None:
    options = replace(OPTIONS, n=8, max_tokens=150)

    async def leave() -> None:
        async for chunk in client.generate(token_ids=PROMPT, options=options):
            if chunk.choice == 7:
                return

    async with asyncio.TaskGroup() as tasks:
        for _ in range(2):
            tasks.create_task(leave())
    await cluster.wait_baseline(10.0)


# Of each option what it may be in a pair; together with another it is neither refused nor void.
VALUES: dict[str, Sequence[Any]] = {
    "temperature": (0.0, 0.5, 3.0),
    "top_k": (1, 5),
    "top_p": (0.05, 0.9),
    "min_p": (0.02, 0.5),
    "presence_penalty": (-1.0, 2.0),
    "frequency_penalty": (-0.5, 1.0),
    "repetition_penalty": (0.8, 1.5),
    "logit_bias": ({7: -100.0, 8: 20.0}, dict.fromkeys(range(8, 16), 40.0)),
    "logprobs": (0, 5, 20),
    "prompt_logprobs": (0, 3, 20),
    "n": (2, 3),
    "max_tokens": (1, 7),
    "min_tokens": (4, NUM_TOKENS - 6),
    "stop": (("e",), ("never said", "a", " ")),
    "stop_token_ids": (tuple(range(8, 200)),),
    "include_stop_str_in_output": (True,),
    "bad_words": (("a", "e"), ("the",)),
    "constraint": (Constraint.regex("[a-f ]{4,20}"), Constraint.choice("yes", "no", "perhaps")),
    "seed": (0, 2**64 - 1),
}
REFUSED = ("max_tokens", "min_tokens")  # where there are to be more than there may be
PAIRS = st.sampled_from(
    [two for two in itertools.combinations(VALUES, 2) if two != REFUSED]
).flatmap(
    lambda names: st.fixed_dictionaries({name: st.sampled_from(VALUES[name]) for name in names})
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone(
    cluster: Cluster, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[DiptychClient]:
    """Of a router whose decode worker computes all prompts itself."""
    flags = {"local-prefill-below-tokens": "100000"}
    with another_router(cluster, tmp_path_factory.mktemp("alone"), tiny_llama, flags) as other:
        await other.wait_ready()
        async with other.client() as opened:
            yield opened


@given(given_options=PAIRS)
@settings(max_examples=NUM_PAIRS, deadline=None, derandomize=not IS_LONG)
async def test_every_pair_of_options_is_what_one_process_makes(
    client: DiptychClient, alone: DiptychClient, given_options: dict[str, Any]
) -> None:
    options = SamplingOptions(**{"seed": 5, "max_tokens": NUM_TOKENS, **given_options})
    made = await ask(client, options, salt="handed over")
    expected = await ask(alone, options, salt="one process")
    assert path_of(made) == inference_pb2.KV_PATH_DISAGGREGATED or options.max_tokens == 1
    if options.prompt_logprobs is None:  # prefill workers alone tell them
        assert path_of(expected) != inference_pb2.KV_PATH_DISAGGREGATED
    assert by_choice(made) == by_choice(expected)
    assert texts(made) == texts(expected)
    assert ends(made) == ends(expected)
    for each, other in zip(logprobs_of(made), logprobs_of(expected), strict=True):
        assert each.top_token_ids == other.top_token_ids
        assert each.logprob == pytest.approx(other.logprob, abs=CLOSE)
        assert each.top_logprobs == pytest.approx(other.top_logprobs, abs=CLOSE)


def path_of(chunks: Sequence[Chunk]) -> int:
    timing = chunks[-1].timing
    assert timing is not None
    return timing.kv_path


def texts(chunks: Sequence[Chunk]) -> dict[int, str]:
    made: dict[int, str] = defaultdict(str)
    for chunk in chunks:
        made[chunk.choice] += chunk.text
    return made


def ends(chunks: Sequence[Chunk]) -> set[tuple[object, ...]]:
    return {
        (chunk.choice, chunk.finish_reason, chunk.stop_match, chunk.stop_token_id)
        for chunk in chunks
        if chunk.finish_reason is not None
    }


def logprobs_of(chunks: Sequence[Chunk]) -> list[TokenLogprobs]:
    """The prompt's, then those of each choice."""
    told = [found for chunk in chunks for found in chunk.prompt_logprobs]
    for choice in sorted({chunk.choice for chunk in chunks}):
        told += [found for each in chunks if each.choice == choice for found in each.logprobs]
    return told

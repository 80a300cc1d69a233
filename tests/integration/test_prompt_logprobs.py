"""What the prefill pool tells of prompts equals transformers, through a real cluster."""

import asyncio
import math
import shutil
import signal
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
import torch

from diptych.client import (
    DiptychClient,
    Pooling,
    SamplingOptions,
    build_embed_request,
    build_score_request,
)
from diptych.engine.kv.cache import KVCache
from diptych.engine.runner import Runner
from diptych.engine.scheduling.block_pool import BlockPool
from diptych.engine.scheduling.report import LogprobsReport
from diptych.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from diptych.engine.scheduling.sequence import Sequence as EngineSequence
from diptych.engine.scheduling.sequence import SequenceKey, SequenceState
from diptych.errors import InvalidRequestError, ModelNotFoundError
from diptych.sampling_params import SamplingParams
from diptych.token_logprobs import PromptLogprobs, TokenLogprobs
from diptych.v1 import common_pb2
from tests import hf_reference
from tests.call import generate, token_request
from tests.cluster import Cluster, Process, running_cluster
from tests.engines import CPU, load_decoder
from tests.integration.conftest import BLOCK_SIZE
from tests.prompts import prompt
from tests.torch_threads import torch_threads

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLOSE = 1e-4
NUM_TOP = 5
MAX_BATCHED_TOKENS = 48  # so that prompts take several steps
PROMPT = prompt(100, seed=5)
Told = Sequence[TokenLogprobs | common_pb2.TokenLogprobs]


def check(told: Told, folder: Path, token_ids: Sequence[int], first: int, num_top: int) -> None:
    """Each token's, and those of the likeliest in its place, as transformers has them."""
    logits = hf_reference.logits(folder, token_ids)
    expected = torch.log_softmax(logits.double(), -1)
    assert len(told) == len(token_ids) - first
    for position, found in enumerate(told, first):
        row = expected[position - 1]
        assert found.logprob == pytest.approx(float(row[token_ids[position]]), abs=CLOSE)
        assert len(found.top_token_ids) == num_top
        best = torch.topk(row, num_top).values.tolist()
        assert list(found.top_logprobs) == pytest.approx(best, abs=CLOSE)
        for token_id, logprob in zip(found.top_token_ids, found.top_logprobs, strict=True):
            assert logprob == pytest.approx(float(row[token_id]), abs=CLOSE)
        assert all(before >= after for before, after in pairwise(found.top_logprobs))


class Engine:
    """Scheduler, pool and runner, stepped by hand: each step has few tokens."""

    def __init__(self, folder: Path) -> None:
        model = load_decoder(folder)
        cache = KVCache(model.config, 64, BLOCK_SIZE)
        config = SchedulerConfig(max_num_seqs=4, max_batched_tokens=40, max_model_len=256)
        self._scheduler = Scheduler(config, BlockPool(64, BLOCK_SIZE))
        self._runner = Runner(model, cache, CPU)
        self.num_steps = self.num_computed = 0

    def tell(self, *reports: LogprobsReport | None) -> list[list[TokenLogprobs]]:
        """Of the prompt, at once, what each of them asks for."""
        sequences = [self._add(number, report) for number, report in enumerate(reports)]
        told: dict[int, list[TokenLogprobs]] = {seq.key.sequence_id: [] for seq in sequences}
        while not all(seq.state is SequenceState.LEASED for seq in sequences):
            plan = self._scheduler.schedule()
            assert plan is not None
            self.num_steps += 1
            self.num_computed += plan.num_tokens
            for update in self._scheduler.update(plan, self._runner.execute(plan)):
                if isinstance(update.report, PromptLogprobs):
                    told[update.sequence.key.sequence_id] += update.report.logprobs
        for seq in sequences:
            self._scheduler.release(seq)
        return list(told.values())

    def _add(self, number: int, report: LogprobsReport | None) -> EngineSequence:
        seq = EngineSequence(
            key=SequenceKey("router", number),
            token_ids=list(PROMPT),
            num_prompt_tokens=len(PROMPT),
            sampling=SamplingParams(temperature=0.0, max_tokens=1),
            prefill_only=True,
            report=report,
        )
        self._scheduler.add_prefill(seq)
        return seq


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gemma"])
async def test_an_engine_tells_what_transformers_says_in_any_batch(
    family: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(family)
    with torch_threads(1):
        engine = Engine(folder)
        engine.tell(None)  # all of it is cached now
        whole = LogprobsReport(1, len(PROMPT), NUM_TOP)
        tail = LogprobsReport(90, len(PROMPT), 0)
        before = engine.num_computed
        told, told_tail, _ = engine.tell(whole, tail, None)
        check(told, folder, PROMPT, 1, NUM_TOP)
        check(told_tail, folder, PROMPT, 90, 0)
        num_cached = 89 // BLOCK_SIZE * BLOCK_SIZE
        rest = len(PROMPT) - num_cached
        last = len(PROMPT) - (len(PROMPT) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert engine.num_computed - before == len(PROMPT) + rest + last, "no less, and no more"


@pytest.fixture(scope="module")
def folder(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose makers say how vectors are made with it."""
    folder = tmp_path_factory.mktemp("embeds") / tiny_llama.name
    shutil.copytree(tiny_llama, folder)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    return folder


@pytest.fixture(scope="module")
def cluster(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(
        tmp_path_factory.mktemp("prompts"),
        str(folder),
        num_prefill=2,
        worker_flags={"num-blocks": "128", "max-model-len": "256"},
        # A worker that answers slowly is not given up for another, which would compute again.
        router_flags={"timers.accept-s": "5"},
        prefill_flags={"max-batched-tokens": str(MAX_BATCHED_TOKENS), "max-num-seqs": "16"},
    ) as running:
        yield running


@pytest.mark.parametrize("max_tokens", [1, 6])
async def test_over_grpc_in_many_parts_whatever_is_cached(
    channel: grpc.aio.Channel, tiny_llama: Path, max_tokens: int
) -> None:
    plain = await generate(channel, token_request(PROMPT, max_tokens=max_tokens))
    request = token_request(PROMPT, max_tokens=max_tokens)
    request.sampling.prompt_logprobs = NUM_TOP
    answer = await generate(channel, request)
    assert answer.error is None
    assert answer.token_ids == plain.token_ids
    check(answer.prompt_logprobs, tiny_llama, PROMPT, 1, NUM_TOP)
    assert answer.usage.num_cached_tokens == 0, "it says so"
    request = token_request(PROMPT, max_tokens=max_tokens + 1, emitted=plain.token_ids)
    request.sampling.prompt_logprobs = NUM_TOP
    resumed = await generate(channel, request)
    assert len(resumed.token_ids) == 1
    assert resumed.prompt_logprobs == [], "they came before the tokens"


async def test_the_client_tells_them_with_the_first_chunk(
    client: DiptychClient, tiny_llama: Path
) -> None:
    options = SamplingOptions(temperature=0, max_tokens=4, prompt_logprobs=0, ignore_eos=True)
    many = [prompt(30 + 7 * number, seed=number) for number in range(6)]

    async def ask(token_ids: list[int]) -> None:
        chunks = [c async for c in client.generate(token_ids=token_ids, options=options)]
        check(chunks[0].prompt_logprobs, tiny_llama, token_ids, 1, 0)
        assert not any(chunk.prompt_logprobs for chunk in chunks[1:])

    async with asyncio.TaskGroup() as tasks:
        for token_ids in many:
            tasks.create_task(ask(token_ids))


async def test_too_many_are_refused_by_name(client: DiptychClient) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        async for _ in client.generate("a", options=SamplingOptions(prompt_logprobs=21)):
            pass
    assert caught.value.field == "sampling.prompt_logprobs"


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_detail_14_a_harness_that_scores_by_echo(
    http: httpx.AsyncClient, tiny_llama: Path, max_tokens: int
) -> None:
    """As lm-eval asks: token ids, echo, logprobs, and no more than one token."""
    async with openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none") as client:
        answer = await client.completions.create(
            model=tiny_llama.name,
            prompt=[PROMPT],
            max_tokens=max_tokens,
            temperature=0,
            echo=True,
            logprobs=1,
            extra_body={"ignore_eos": True},
        )
    (choice,) = answer.choices
    assert choice.logprobs is not None
    values: Any = choice.logprobs.token_logprobs
    assert values[0] is None
    assert len(values) == len(PROMPT) + max_tokens
    expected = torch.log_softmax(hf_reference.logits(tiny_llama, PROMPT).double(), -1)
    own = [float(expected[at - 1, PROMPT[at]]) for at in range(1, len(PROMPT))]
    assert values[1 : len(PROMPT)] == pytest.approx(own, abs=CLOSE)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == max_tokens


async def test_an_echo_is_the_prompt_as_it_was_written(
    http: httpx.AsyncClient, tiny_llama: Path
) -> None:
    body = {"model": tiny_llama.name, "prompt": "The small river", "max_tokens": 5}
    body |= {"temperature": 0, "ignore_eos": True}
    plain = (await http.post("/v1/completions", json=body)).json()
    echoed = (await http.post("/v1/completions", json={**body, "echo": True})).json()
    text = "The small river" + plain["choices"][0]["text"]
    assert echoed["choices"][0]["text"] == text
    assert echoed["usage"] == plain["usage"] | {
        "prompt_tokens_details": echoed["usage"]["prompt_tokens_details"]
    }


async def test_a_chat_tells_them_beside_its_choices(
    http: httpx.AsyncClient, tiny_llama: Path
) -> None:
    body = {
        "model": tiny_llama.name,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 1,
        "prompt_logprobs": 2,
    }
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    first, *rest = answer["prompt_logprobs"]
    assert first is None
    assert len(rest) == answer["usage"]["prompt_tokens"] - 1
    for entry in rest:
        assert 2 <= len(entry) <= 3
        assert sorted(each["rank"] for each in entry.values() if each["rank"]) == [1, 2]


def states(folder: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """transformers' last hidden states: [num_tokens, hidden_size]."""
    with torch.inference_mode():
        made = hf_reference.load(folder).model(torch.tensor([list(token_ids)]))
    hidden: torch.Tensor = made.last_hidden_state[0].double()
    return hidden


def scored(folder: Path, before: Sequence[int], token_ids: Sequence[int]) -> list[float]:
    tokens = [*before, *token_ids]
    expected = torch.log_softmax(hf_reference.logits(folder, tokens).double(), -1)
    first = max(1, len(before))
    return [float(expected[at - 1, tokens[at]]) for at in range(first, len(tokens))]


def num_computed(workers: Sequence[Process]) -> float:
    """Tokens that their engines have computed so far."""
    return sum(worker.metric("diptych_engine_tokens_total") for worker in workers)


async def test_continuations_are_as_likely_as_transformers_says(
    client: DiptychClient, cluster: Cluster, tiny_llama: Path
) -> None:
    before = prompt(70, seed=9)
    greedy = int(hf_reference.logits(tiny_llama, before)[-1].argmax())
    given = [[greedy], *(prompt(2 + number, seed=20 + number) for number in range(20))]
    computed = num_computed(cluster.prefill), num_computed(cluster.decode)
    scores = await client.score(build_score_request(given, before))
    for token_ids, score in zip(given, scores, strict=True):
        assert score.logprobs == pytest.approx(scored(tiny_llama, before, token_ids), abs=CLOSE)
    assert [score.is_greedy for score in scores] == [True] + [False] * 20
    alone = sum(len(before) % BLOCK_SIZE + len(token_ids) for token_ids in given)
    most = alone + len(cluster.prefill) * len(before)  # once where it comes, not for each
    assert num_computed(cluster.prefill) - computed[0] <= most
    assert num_computed(cluster.decode) == computed[1], "it is the prefill pool's work"


async def test_without_a_prompt_texts_are_scored_from_their_second_token(
    client: DiptychClient, tiny_llama: Path
) -> None:
    tokens = prompt(40, seed=11)
    (score,) = await client.score(build_score_request([tokens]))
    expected = scored(tiny_llama, [], tokens)
    assert score.logprobs == pytest.approx(expected, abs=CLOSE)
    assert score.perplexity == pytest.approx(math.exp(-sum(expected) / 39), rel=1e-3)


async def test_a_continuing_text_has_no_special_tokens(client: DiptychClient) -> None:
    before = await client.tokenize("The small river")
    texts = [" carries", " opens another letter"]
    ids = [(await client.tokenize(text)) for text in texts]
    bos = [each[1:] if each[0] == before[0] and len(each) > 1 else each for each in ids]
    by_text = await client.score(build_score_request(texts, "The small river"))
    assert [len(score.logprobs) for score in by_text] in (
        [len(each) for each in ids],
        [len(each) for each in bos],
    )


@pytest.mark.parametrize("pooling", [Pooling.MEAN, Pooling.LAST_TOKEN, None])
async def test_vectors_are_those_of_transformers(
    client: DiptychClient, tiny_llama: Path, pooling: Pooling | None
) -> None:
    given = [prompt(3 + 17 * number, seed=40 + number) for number in range(8)]
    request = build_embed_request(given, pooling=pooling, normalize=False)
    again = build_embed_request(given, pooling=pooling, dimensions=10)
    plain, unit = await client.embed(request), await client.embed(again)
    for token_ids, vector, short in zip(given, plain, unit, strict=True):
        hidden = states(tiny_llama, token_ids)
        expected = hidden[-1] if pooling is Pooling.LAST_TOKEN else hidden.mean(0)
        assert vector == pytest.approx(expected.tolist(), abs=CLOSE)
        expected = torch.nn.functional.normalize(expected[:10], dim=0)
        assert short == pytest.approx(expected.tolist(), abs=CLOSE)


async def test_detail_24_openais_client_reads_vectors(
    http: httpx.AsyncClient, client: DiptychClient, tiny_llama: Path
) -> None:
    """It asks for base64 by default."""
    given = [prompt(9, seed=1), prompt(12, seed=2)]
    expected = await client.embed(build_embed_request(given))
    async with openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none") as asked:
        made = await asked.embeddings.create(model=tiny_llama.name, input=given)
        one = await asked.embeddings.create(model=tiny_llama.name, input="The small river")
    assert [each.embedding for each in made.data] == [
        pytest.approx(vector, abs=1e-6) for vector in expected
    ]
    assert made.usage.prompt_tokens == 21
    (alone,) = await client.embed(build_embed_request(["The small river"]))
    assert one.data[0].embedding == pytest.approx(alone, abs=1e-6)


async def test_documents_are_ranked_by_how_near_they_are(
    http: httpx.AsyncClient, tiny_llama: Path
) -> None:
    texts = ["another letter", "The quiet garden", "The small river"]
    body = {"model": tiny_llama.name, "query": "The small river", "documents": texts}
    ranked = (await http.post("/rerank", json=body)).json()["results"]
    assert ranked[0]["index"] == 2
    assert ranked[0]["relevance_score"] == pytest.approx(1.0, abs=CLOSE)
    near = [each["relevance_score"] for each in ranked]
    assert near == sorted(near, reverse=True)
    assert (await http.post("/v1/rerank", json={**body, "top_n": 1})).json()["results"] == [
        ranked[0] | {"relevance_score": pytest.approx(ranked[0]["relevance_score"])}
    ]
    body = {"model": tiny_llama.name, "text_1": "The small river", "text_2": texts}
    compared = (await http.post("/score", json=body)).json()["data"]
    by_index = {each["index"]: each["relevance_score"] for each in ranked}
    assert {each["index"]: each["score"] for each in compared} == pytest.approx(by_index, abs=CLOSE)


async def test_continuations_are_scored_over_http(
    http: httpx.AsyncClient, client: DiptychClient, tiny_llama: Path
) -> None:
    body = {"model": tiny_llama.name, "prompt": "The small", "continuations": [" river", [5, 6]]}
    made = (await http.post("/score", json=body)).json()["data"]
    expected = await client.score(build_score_request([" river", [5, 6]], "The small"))
    for each, score in zip(made, expected, strict=True):
        assert each["logprobs"] == pytest.approx(score.logprobs, abs=CLOSE)
        assert each["score"] == pytest.approx(score.logprob, abs=CLOSE)


@pytest.mark.parametrize(
    ("path", "members", "field"),
    [
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input[1]"),
        ("/v1/embeddings", {"input": ["a", 3]}, "input[1]"),
        ("/v1/embeddings", {"input": [[5, 100_000]]}, "input[0][1]"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "dimensions": 10_000}, "dimensions"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "input"),
        ("/v1/embeddings", {"input": ["a", "the river " * 200]}, "input[1]"),
        ("/v1/embeddings", {"input": "the river " * 200}, "input"),
        ("/score", {"prompt": "a", "continuations": []}, "continuations"),
        ("/score", {"continuations": ["a b", ""]}, "continuations[1]"),
        ("/score", {"continuations": "the river " * 200}, "continuations"),
        ("/score", {"prompt": "the river " * 200, "continuations": ["a"]}, "prompt"),
        ("/score", {"prompt": "", "continuations": ["a"]}, "prompt"),
        ("/score", {"continuations": [[5]]}, "continuations[0]"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1"),
        ("/rerank", {"query": "a", "documents": ["a", ""]}, "documents[1]"),
        ("/rerank", {"query": "a", "documents": ["a", "the river " * 200]}, "documents[1]"),
        ("/rerank", {"query": "a"}, "documents"),
    ],
)
async def test_what_is_wrong_is_refused_by_its_name(
    http: httpx.AsyncClient, tiny_llama: Path, path: str, members: dict[str, Any], field: str
) -> None:
    response = await http.post(path, json={"model": tiny_llama.name, **members})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == field


async def test_what_is_wrong_is_refused_by_its_name_over_grpc(client: DiptychClient) -> None:
    wrong = {
        "continuations": build_score_request([], "a"),
        "continuations[1].tokens.ids[0]": build_score_request(["a", [10_000]], "a"),
        "continuations[0]": build_score_request([prompt(200)], prompt(100)),
    }
    for field, request in wrong.items():
        with pytest.raises(InvalidRequestError) as caught:
            await client.score(request)
        assert caught.value.field == field
    with pytest.raises(InvalidRequestError) as caught:
        await client.embed(build_embed_request(["a"], dimensions=10_000))
    assert caught.value.field == "dimensions"
    with pytest.raises(ModelNotFoundError):
        await client.embed(build_embed_request(["a"], model="gpt-17"))


async def test_a_killed_prefill_workers_prompts_are_computed_by_another(
    client: DiptychClient, cluster: Cluster, tiny_llama: Path
) -> None:
    given = [prompt(200 + number % 8, seed=100 + number) for number in range(40)]
    request = build_embed_request(given, pooling=Pooling.MEAN, normalize=False)
    killed = cluster.prefill[0]
    await cluster.start_again(killed)
    killed.signal(signal.SIGSTOP)  # what it is given it cannot have done before it is killed
    async with asyncio.TaskGroup() as tasks:
        embedding = tasks.create_task(client.embed(request, timeout_s=60.0))
        await asyncio.sleep(0.2)
        killed.kill()
    for token_ids, vector in zip(given[::5], embedding.result()[::5], strict=True):
        assert vector == pytest.approx(states(tiny_llama, token_ids).mean(0).tolist(), abs=CLOSE)


async def test_nothing_is_left_behind(cluster: Cluster) -> None:
    await cluster.wait_baseline(10.0)

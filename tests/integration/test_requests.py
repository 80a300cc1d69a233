"""What a client may send, right and wrong, through a real router and real workers."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest
import torch
import yaml

from diptych.client import DiptychClient
from diptych.errors import InvalidRequestError, ModelNotFoundError
from diptych.rpc.status import from_rpc_error
from diptych.v1 import common_pb2, inference_pb2
from tests import hf_reference
from tests.call import generate, token_request
from tests.cluster import Cluster, running_cluster
from tests.integration.conftest import TINY_MAX_LEN
from tests.unit.deploy.chart import CHART
from tests.unit.deploy.dashboard import expressions, metric_names

PROMPT = [5, 9, 77, 130, 200, 31, 44, 45, 46, 90, 91, 92]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def cluster(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    flags = {"num-blocks": "128", "max-model-len": str(TINY_MAX_LEN)}
    with running_cluster(
        tmp_path_factory.mktemp("requests"),
        str(tiny_llama),
        worker_flags=flags,
        router_flags={"local-prefill-below-tokens": "0"},
    ) as running:
        yield running


def altered(request: inference_pb2.GenerateRequest) -> inference_pb2.GenerateRequest:
    """``PROMPT`` for 4 tokens with one thing changed by ``request``."""
    made = token_request(PROMPT, max_tokens=4)
    made.MergeFrom(request)
    return made


def sampling(**values: object) -> inference_pb2.GenerateRequest:
    params = inference_pb2.SamplingOptions(**values)  # type: ignore[arg-type]
    return inference_pb2.GenerateRequest(sampling=params)


REFUSED = {
    "empty tokens": (inference_pb2.GenerateRequest(tokens=inference_pb2.TokenPrompt()), "tokens"),
    "no prompt": (inference_pb2.GenerateRequest(), "prompt"),
    "empty text": (inference_pb2.GenerateRequest(text=""), "text"),
    "no messages": (
        inference_pb2.GenerateRequest(chat=inference_pb2.ChatPrompt()),
        "chat.messages",
    ),
    "one over": (token_request(list(range(3, 3 + TINY_MAX_LEN))), "tokens"),
    "token id": (token_request([5, 100_000]), "tokens.ids[1]"),
    "1 MiB of text": (inference_pb2.GenerateRequest(text="diptych " * 131_072), "text"),
    "max_tokens 0": (altered(sampling(max_tokens=0)), "sampling.max_tokens"),
    "max_tokens beyond": (altered(sampling(max_tokens=TINY_MAX_LEN)), "sampling.max_tokens"),
    "min over max": (altered(sampling(min_tokens=9)), "sampling.min_tokens"),
    "temperature": (altered(sampling(temperature=-0.1)), "sampling.temperature"),
    "temperature nan": (altered(sampling(temperature=float("nan"))), "sampling.temperature"),
    "top_p 0": (altered(sampling(top_p=0.0)), "sampling.top_p"),
    "top_p over": (altered(sampling(top_p=1.5)), "sampling.top_p"),
    "empty stop": (altered(sampling(stop=["a", ""])), "sampling.stop[1]"),
    "too many stops": (altered(sampling(stop=["a"] * 17)), "sampling.stop"),
    "stop token": (altered(sampling(stop_token_ids=[1 << 20])), "sampling.stop_token_ids[0]"),
    "request id": (token_request([5], request_id="a b"), "request_id"),
    "seed to resume": (token_request([5], temperature=1.0, emitted=[6]), "sampling.seed"),
    "ttft_ms": (altered(inference_pb2.GenerateRequest(ttft_ms=-1.0)), "ttft_ms"),
    "prompt_logprobs": (altered(sampling(prompt_logprobs=21)), "sampling.prompt_logprobs"),
    "logprobs": (altered(sampling(logprobs=21)), "sampling.logprobs"),
    "adapter": (altered(inference_pb2.GenerateRequest(adapter="a")), "adapter"),
    "salt": (token_request([5], salt="s" * 65), "cache_salt"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_bad_request_is_refused_by_field(
    cluster: Cluster, channel: grpc.aio.Channel, case: str
) -> None:
    request, field = REFUSED[case]
    answer = await generate(channel, request, timeout_s=10)
    assert isinstance(answer.error, InvalidRequestError), answer.error
    assert answer.error.field == field
    assert answer.token_ids == []


async def test_unknown_model_lists_the_known(channel: grpc.aio.Channel) -> None:
    answer = await generate(channel, altered(inference_pb2.GenerateRequest(model="gpt-17")))
    assert isinstance(answer.error, ModelNotFoundError)
    assert "gpt-17" in answer.error.message


async def test_invalid_utf8_in_a_stop_string_names_it(channel: grpc.aio.Channel) -> None:
    request = altered(sampling(stop=["fine", "QQQQ"])).SerializeToString()
    call = channel.unary_stream(
        "/diptych.v1.Inference/Generate",
        request_serializer=None,
        response_deserializer=inference_pb2.GenerateResponse.FromString,
    )(request.replace(b"QQQQ", b"\xff\xfe\xfd\xfc"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    error = from_rpc_error(caught.value)
    assert isinstance(error, InvalidRequestError)
    assert error.field == "sampling.stop[1]"


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
async def test_few_tokens(channel: grpc.aio.Channel, tiny_llama: Path, max_tokens: int) -> None:
    answer = await generate(channel, token_request(PROMPT, max_tokens=max_tokens))
    assert answer.error is None
    assert answer.token_ids == hf_reference.greedy(tiny_llama, PROMPT, max_tokens).token_ids
    assert answer.finish_reason == common_pb2.FINISH_REASON_LENGTH


async def test_longest_prompt_has_room_for_one_token(channel: grpc.aio.Channel) -> None:
    longest = [3 + i % 400 for i in range(TINY_MAX_LEN - 1)]
    answer = await generate(channel, token_request(longest))
    assert answer.error is None
    assert len(answer.token_ids) == 1
    assert answer.finish_reason == common_pb2.FINISH_REASON_LENGTH


async def test_stop_token_at_the_first_token(channel: grpc.aio.Channel, tiny_llama: Path) -> None:
    first = hf_reference.greedy(tiny_llama, PROMPT, 1).token_ids[0]
    answer = await generate(channel, altered(sampling(stop_token_ids=[first])))
    assert answer.error is None
    assert answer.token_ids == [first]
    assert answer.text == ""
    assert answer.finish_reason == common_pb2.FINISH_REASON_STOP


async def test_min_tokens_holds_a_stop_token_back(
    channel: grpc.aio.Channel, tiny_llama: Path
) -> None:
    first = hf_reference.greedy(tiny_llama, PROMPT, 1).token_ids[0]
    request = altered(sampling(stop_token_ids=[first], min_tokens=2))
    answer = await generate(channel, request)
    assert answer.error is None
    assert first not in answer.token_ids[:2]
    assert len(answer.token_ids) >= 2


async def test_stop_string_ends_the_text_before_it(channel: grpc.aio.Channel) -> None:
    plain = await generate(channel, token_request(PROMPT, max_tokens=24))
    text = plain.text
    stop = text[len(text) // 2 :][:3]
    assert stop.strip(), "the tiny model's text has nothing to stop at"
    request = token_request(PROMPT, max_tokens=24)
    request.sampling.stop.append(stop)
    answer = await generate(channel, request)
    assert answer.error is None
    assert answer.finish_reason == common_pb2.FINISH_REASON_STOP
    assert answer.finished.stop == stop
    assert answer.text == text[: text.index(stop)]


async def test_stop_string_in_the_first_token(channel: grpc.aio.Channel) -> None:
    plain = await generate(channel, token_request(PROMPT, max_tokens=24))
    first_char = plain.text[0]
    request = token_request(PROMPT, max_tokens=24)
    request.sampling.stop.append(first_char)
    answer = await generate(channel, request)
    assert answer.error is None
    assert (answer.text, answer.finished.stop) == ("", first_char)


async def test_seeded_runs_repeat_and_seeds_differ(channel: grpc.aio.Channel) -> None:
    runs = [
        await generate(channel, token_request(PROMPT, max_tokens=16, temperature=1.0, seed=seed))
        for seed in (7, 7, 8)
    ]
    assert runs[0].token_ids == runs[1].token_ids
    assert runs[0].token_ids != runs[2].token_ids


async def test_the_stream_begins_with_what_the_request_became(
    cluster: Cluster, channel: grpc.aio.Channel
) -> None:
    request = altered(inference_pb2.GenerateRequest(return_prompt_token_ids=True))
    answer = await generate(channel, request)
    assert answer.error is None
    assert list(answer.started.prompt_token_ids) == PROMPT
    assert answer.started.request_id
    async with DiptychClient(cluster.router.address) as client:
        (served,) = await client.models()
    assert answer.started.model == served.name
    assert not (await generate(channel, altered(sampling()))).started.prompt_token_ids


async def test_a_drawn_seed_is_told_and_repeats_the_answer(channel: grpc.aio.Channel) -> None:
    request = token_request(PROMPT, max_tokens=16, temperature=1.0)
    first = await generate(channel, request)
    request.sampling.seed = first.started.seed
    again = await generate(channel, request)
    assert again.token_ids == first.token_ids
    assert again.started.seed == first.started.seed


async def test_a_stop_token_is_named(channel: grpc.aio.Channel, tiny_llama: Path) -> None:
    first = hf_reference.greedy(tiny_llama, PROMPT, 1).token_ids[0]
    answer = await generate(channel, altered(sampling(stop_token_ids=[first])))
    assert answer.finished.stop_token_id == first
    assert not answer.finished.HasField("stop")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_resumed_answer_is_the_unbroken_one(
    channel: grpc.aio.Channel, temperature: float
) -> None:
    def request(emitted: Sequence[int] = ()) -> inference_pb2.GenerateRequest:
        return token_request(
            PROMPT, max_tokens=20, temperature=temperature, seed=11, emitted=emitted
        )

    whole = await generate(channel, request())
    assert whole.timing.kv_path == inference_pb2.KV_PATH_DISAGGREGATED
    for num_emitted in (1, 7, 16, 19):
        rest = await generate(channel, request(whole.token_ids[:num_emitted]))
        assert rest.error is None
        assert rest.token_ids == whole.token_ids[num_emitted:]
        assert whole.text.endswith(rest.text)
        assert rest.finish_reason == whole.finish_reason
        usage = rest.usage
        assert (usage.num_prompt_tokens, usage.num_output_tokens) == (len(PROMPT), 20)
        assert usage.num_resumed_tokens == num_emitted
        alone = num_emitted == 19
        path = inference_pb2.KV_PATH_PREFILL_ONLY if alone else inference_pb2.KV_PATH_DISAGGREGATED
        assert rest.timing.kv_path == path


async def test_a_whole_answer_resumed_ends_at_once(channel: grpc.aio.Channel) -> None:
    whole = await generate(channel, token_request(PROMPT, max_tokens=8))
    rest = await generate(channel, token_request(PROMPT, max_tokens=8, emitted=whole.token_ids))
    assert rest.error is None
    assert rest.token_ids == []
    assert whole.text.endswith(rest.text), "a broken character is shown at the end only"
    assert rest.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert not rest.timing.prefill_worker
    assert not rest.timing.decode_worker


async def test_an_answer_is_not_resumed_after_its_stop_string(channel: grpc.aio.Channel) -> None:
    request = token_request(PROMPT, max_tokens=16)
    whole = await generate(channel, request)
    request.sampling.stop.append(whole.text[4:6])
    stopped = await generate(channel, request)
    assert stopped.finished.stop == whole.text[4:6]
    request.emitted_token_ids.extend(whole.token_ids)
    rest = await generate(channel, request)
    assert isinstance(rest.error, InvalidRequestError)
    assert rest.error.field == f"emitted_token_ids[{len(stopped.token_ids)}]"


async def test_an_oversized_request_is_refused_unread(channel: grpc.aio.Channel) -> None:
    request = token_request([5] * (5 * 2**20))
    answer = await generate(channel, request)
    assert isinstance(answer.error, InvalidRequestError)
    assert answer.error.field == "request"


async def test_nothing_is_held_afterwards(cluster: Cluster, channel: grpc.aio.Channel) -> None:
    await cluster.wait_baseline(within_s=2)


async def test_log_probabilities_are_the_models_own(
    channel: grpc.aio.Channel, tiny_llama: Path
) -> None:
    """Of each worker's tokens, whatever sampling made of them; resumed answers go on with them."""
    request = token_request(PROMPT, max_tokens=10, temperature=1.5, seed=4)
    request.sampling.MergeFrom(
        inference_pb2.SamplingOptions(
            logprobs=5, top_k=40, repetition_penalty=1.5, logit_bias={9: 6.0, 44: 6.0}
        )
    )
    answer = await generate(channel, request)
    assert answer.error is None
    token_ids = answer.token_ids
    logits = hf_reference.logits(tiny_llama, [*PROMPT, *token_ids])[len(PROMPT) - 1 : -1]
    expected = torch.log_softmax(logits.double(), 1)
    assert len(answer.logprobs) == len(token_ids) == 10
    for row, token_id, found in zip(expected, token_ids, answer.logprobs, strict=True):
        assert found.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        top = torch.topk(row, 5).values.tolist()
        assert list(found.top_logprobs) == pytest.approx(top, abs=1e-4)
        named = [float(row[i]) for i in found.top_token_ids]
        assert named == pytest.approx(top, abs=1e-4)
    request.emitted_token_ids.extend(token_ids[:4])
    resumed = await generate(channel, request)
    assert resumed.token_ids == token_ids[4:]
    assert [found.logprob for found in resumed.logprobs] == pytest.approx(
        [found.logprob for found in answer.logprobs[4:]], abs=1e-5
    )


TOLD_WHERE_TRACED = {"diptych_trace_spans_sent", "diptych_trace_spans_unsent"}
"""With a collector alone: test_trace_headers.py finds them there."""


TOLD_WHERE_KEYED = {
    f"diptych_tenant_{what}_total"
    for what in ("requests", "input_tokens", "cached_tokens", "output_tokens", "queue_seconds")
}
"""Where clients are known alone: test_signed_tokens.py finds them there."""


async def test_every_series_of_the_dashboard_and_of_alerts_is_told(
    cluster: Cluster, channel: grpc.aio.Channel
) -> None:
    """By one of the processes, once there was a request."""
    assert (await generate(channel, token_request(PROMPT, max_tokens=4))).error is None
    samples = {key for process in cluster.processes for key in process.metrics()}
    told = {key.partition("{")[0] for key in samples}
    elsewhere = TOLD_WHERE_TRACED | TOLD_WHERE_KEYED
    assert not told & elsewhere, "nothing is traced here, and all clients are alike"
    told |= elsewhere
    whose = r"(namespace=|pod=~)\{\{.*?\}\}(, )?"
    text = re.sub(whose, "", (CHART / "alerts.yaml").read_text())
    rules = yaml.safe_load(re.sub(r"\{\{.*?\}\}", "", text))
    for expr in [*expressions(), *(rule["expr"] for rule in rules)]:
        names = metric_names(expr)
        assert names <= told, names - told
        assert set(re.findall(r"\w+\{[^}]+\}", expr)) <= samples
        if not names <= elsewhere:  # which were not told here
            labelled = " ".join(key for key in samples if key.partition("{")[0] in names)
            by = {
                label for each in re.findall(r"by \(([^)]*)\)", expr) for label in each.split(", ")
            }
            assert by - {"instance"} <= set(re.findall(r'(\w+)="', labelled)), expr

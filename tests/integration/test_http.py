"""The OpenAI-compatible API through a real cluster: by OpenAI's own client, and raw.

Tests named ``detail_N`` are of a list of twenty-five things that clients of such APIs trip over.
"""

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.client import SamplingOptions
from router.frontend.http import unserved
from router.frontend.http.sampling_fields import SERVED
from tests.cluster import Cluster, running_cluster
from tests.integration.http_bodies import CHAT_ERRORS, ERRORS, MESSAGES
from tests.integration.http_calls import GO_ON, PROMPT, body_of, by_grpc, chat, complete, events

MAX_LEN = 600

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def cluster(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(
        tmp_path_factory.mktemp("http"),
        str(tiny_llama),
        worker_flags={"num-blocks": "128", "max-model-len": str(MAX_LEN)},
        router_flags={"local-prefill-below-tokens": "0", "max-request-bytes": "65536"},
    ) as running:
        yield running


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> str:
    return tiny_llama.name


async def refused(http: httpx.AsyncClient, content: bytes, path: str = "/v1/completions") -> Any:
    """The error that answers a body."""
    headers = {"content-type": "application/json"}
    response = await http.post(path, content=content, headers=headers)
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return {"status": response.status_code, **error}


@pytest.mark.parametrize(
    ("path", "members"),
    [
        ("/rerank", {"query": "a", "documents": ["b"]}),
        ("/score", {"text_1": "a", "text_2": "b"}),
    ],
)
async def test_texts_are_compared_only_by_models_made_for_it(
    http: httpx.AsyncClient, model: str, path: str, members: dict[str, Any]
) -> None:
    error = await refused(http, json.dumps({"model": model, **members}).encode(), path)
    assert (error["status"], error["param"]) == (400, "model")
    assert "1_Pooling" in error["message"]


async def test_models(openai_client: openai.AsyncOpenAI, model: str) -> None:
    (listed,) = (await openai_client.models.list()).data
    assert listed.id == model
    assert (await openai_client.models.retrieve(model)).id == model
    with pytest.raises(openai.NotFoundError):
        await openai_client.models.retrieve("another/model")


async def test_a_completion_is_what_grpc_answers(
    openai_client: openai.AsyncOpenAI, cluster: Cluster, model: str
) -> None:
    options = SamplingOptions(temperature=0, max_tokens=40, ignore_eos=True)
    expected = await by_grpc(cluster, options, prompt=PROMPT)
    whole = await complete(openai_client, model, max_tokens=40)
    assert whole.choices[0].text == expected
    assert whole.choices[0].finish_reason == "length"
    stream = await openai_client.completions.create(
        model=model, prompt=PROMPT, temperature=0, max_tokens=40, extra_body=GO_ON, stream=True
    )
    assert "".join([piece.choices[0].text async for piece in stream]) == expected


async def test_an_answer_tells_where_its_time_went_to_who_asks(
    http: httpx.AsyncClient, model: str
) -> None:
    asked = f"Nobody has asked this before. {PROMPT}"  # so that all of its KV moves
    body = body_of(model, prompt=asked, ignore_eos=True, return_timing=True)
    whole = (await http.post("/v1/completions", json=body)).json()
    *_, last = await events(http, "/v1/completions", body)
    for timing in (whole["timing"], last["timing"]):
        stages = timing["queue_s"] + timing["prefill_s"] + timing["first_write_s"]
        assert timing["ttft_s"] == pytest.approx(stages)
        assert timing["decode_s"] > 0
    assert whole["timing"]["kv_path"] == "disaggregated"
    assert whole["timing"]["transfer"]["num_bytes"] > 0


async def test_how_the_pools_are_is_told_over_both_front_ends(
    http: httpx.AsyncClient, cluster: Cluster
) -> None:
    told = (await http.get("/v1/cluster")).json()
    async with cluster.client() as grpc:
        by_grpc = await grpc.cluster()
    (prefill,), (decode,), (pair,) = told["prefill"], told["decode"], told["pairs"]
    assert [prefill["address"], decode["address"]] == [
        by_grpc.prefill[0].address,
        by_grpc.decode[0].address,
    ]
    assert (pair["prefill"], pair["decode"]) == (prefill["address"], decode["address"])
    assert (pair["state"], prefill["state"], decode["is_used"]) == ("proven", "ready", True)
    for worker in (prefill, decode):
        blocks = worker["blocks"]
        assert blocks.pop("total") == sum(blocks.values()) == 128


async def test_a_chat_is_what_grpc_answers(
    openai_client: openai.AsyncOpenAI, cluster: Cluster, model: str
) -> None:
    turns = [
        ("system", "What is the capital of France?"),
        ("user", "The quiet garden opens "),
        ("assistant", "another number."),
        ("user", "In 1900 the engine was bright."),
    ]
    options = SamplingOptions(
        temperature=0.9, top_p=0.9, top_k=40, seed=7, max_tokens=40, ignore_eos=True
    )
    expected = await by_grpc(cluster, options, messages=turns)
    sampled = {
        "temperature": 0.9,
        "top_p": 0.9,
        "seed": 7,
        "max_completion_tokens": 40,
        "extra_body": {**GO_ON, "top_k": 40},
    }
    whole = await chat(openai_client, model, **sampled)
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content == expected
    stream: Any = await chat(openai_client, model, **sampled, stream=True)
    texts = [piece.choices[0].delta.content or "" async for piece in stream]
    assert "".join(texts) == expected
    other = await chat(openai_client, model, **{**sampled, "seed": 8})
    assert other.choices[0].message.content != expected


async def test_a_bias_decides_on_both_workers(
    openai_client: openai.AsyncOpenAI, http: httpx.AsyncClient, model: str
) -> None:
    """The first token is the prefill worker's, the others are the decode worker's."""
    read = (await http.post("/tokenize", json={"model": model, "prompt": PROMPT})).json()["tokens"]
    wanted = read[-1]
    said = (await http.post("/detokenize", json={"tokens": [wanted] * 6})).json()["prompt"]
    for sampled in ({"temperature": 0}, {"temperature": 1.5, "seed": 3}):
        forced = await complete(
            openai_client, model, max_tokens=6, logit_bias={str(wanted): 100}, **sampled
        )
        assert forced.choices[0].text == said
    with pytest.raises(openai.BadRequestError) as caught:
        await complete(openai_client, model, logit_bias={"100000": 1})
    assert caught.value.param == "logit_bias[100000]"


async def test_bad_words_do_not_come(openai_client: openai.AsyncOpenAI, model: str) -> None:
    """The prefill worker has to draw another first token, the decode worker another later one."""

    async def tokens(*bad_words: str) -> list[str]:
        asked = {"logprobs": 0, "extra_body": {**GO_ON, "bad_words": bad_words}}
        found = (await complete(openai_client, model, max_tokens=12, **asked)).choices[0].logprobs
        assert found is not None
        return list(found.tokens or [])

    said = await tokens()
    for word in (said[0], next(token for token in said[2:] if token.isascii())):
        assert word not in await tokens("never said", word)


async def test_min_p_decides_on_both_workers(openai_client: openai.AsyncOpenAI, model: str) -> None:
    """With 1 nothing is left to draw but the likeliest."""
    expected = (await complete(openai_client, model, max_tokens=8)).choices[0].text
    sampled: dict[str, Any] = {"temperature": 50, "seed": 5, "max_tokens": 8}
    for min_p, is_same in ((1, True), (0, False)):
        drawn = await complete(
            openai_client, model, **sampled, extra_body={**GO_ON, "min_p": min_p}
        )
        assert (drawn.choices[0].text == expected) == is_same


@pytest.mark.parametrize(
    "penalty",
    [{"presence_penalty": 2.0}, {"frequency_penalty": 1.0}, {"repetition_penalty": 1.5}],
    ids=lambda penalty: next(iter(penalty)),
)
async def test_a_penalty_is_what_grpc_answers(
    openai_client: openai.AsyncOpenAI, cluster: Cluster, model: str, penalty: dict[str, float]
) -> None:
    """Eight tokens that are all but certain come otherwise than without it."""
    bias = dict.fromkeys(range(8, 16), 60.0)
    plain = SamplingOptions(temperature=3, seed=5, max_tokens=30, ignore_eos=True, logit_bias=bias)
    without = await by_grpc(cluster, plain, prompt=PROMPT)
    options: dict[str, Any] = dict(penalty)
    expected = await by_grpc(cluster, replace(plain, **options), prompt=PROMPT)
    assert expected != without
    answered = await complete(
        openai_client,
        model,
        temperature=3,
        seed=5,
        max_tokens=30,
        logit_bias={str(token_id): value for token_id, value in bias.items()},
        extra_body={**GO_ON, **penalty},
    )
    assert answered.choices[0].text == expected


async def test_detail_12_log_probabilities_come_with_each_token(
    openai_client: openai.AsyncOpenAI, http: httpx.AsyncClient, cluster: Cluster, model: str
) -> None:
    """Those that gRPC tells, in each API's own form; of a stop string's tokens too."""
    options = SamplingOptions(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
    async with cluster.client() as grpc:
        chunks = [chunk async for chunk in grpc.generate(prompt=PROMPT, options=options)]
    expected = [found.logprob for chunk in chunks for found in chunk.logprobs]
    choice = (await complete(openai_client, model, max_tokens=12, logprobs=3)).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == pytest.approx(expected, abs=1e-5)
    assert "".join(choice.logprobs.tokens or []) == choice.text
    tops = zip(choice.logprobs.tokens or [], choice.logprobs.top_logprobs or [], strict=True)
    assert all(max(top, key=lambda name: top[name]) == token for token, top in tops)
    stop = choice.text[4:9]
    body = body_of(model, logprobs=0, stop=stop, **GO_ON)
    told = [event["choices"][0] for event in await events(http, "/v1/completions", body)]
    tokens = [token for piece in told if piece["logprobs"] for token in piece["logprobs"]["tokens"]]
    assert stop in "".join(tokens)
    asked = {"max_tokens": 5, "logprobs": True, "top_logprobs": 2}
    said = (await chat(openai_client, model, **asked)).choices[0]
    assert said.logprobs is not None
    entries = said.logprobs.content or []
    spoken = [entry.token for entry in entries if entry.token != "<end>"]  # ignored, and no text
    assert "".join(spoken) == said.message.content
    assert [len(entry.top_logprobs) for entry in entries] == [2] * 5
    assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in entries)


async def test_token_ids_and_their_text(
    openai_client: openai.AsyncOpenAI, http: httpx.AsyncClient, cluster: Cluster, model: str
) -> None:
    read = (await http.post("/tokenize", json={"model": model, "prompt": PROMPT})).json()
    assert read["count"] == len(read["tokens"])
    assert read["max_model_len"] == MAX_LEN
    asked = {"tokens": [2, *read["tokens"]]}
    said = (await http.post("/detokenize", json=asked)).json()
    assert said == {"prompt": f"<eos>{PROMPT}"}
    plain = (await http.post("/detokenize", json={**asked, "skip_special_tokens": True})).json()
    assert plain == {"prompt": PROMPT}
    by_ids = await complete(openai_client, model, prompt=[read["tokens"]], max_tokens=8)
    assert (
        by_ids.choices[0].text
        == (await complete(openai_client, model, max_tokens=8)).choices[0].text
    )
    assert by_ids.usage is not None
    assert by_ids.usage.prompt_tokens == read["count"]
    turns = (await http.post("/tokenize", json={"messages": MESSAGES})).json()
    nothing_else = {"prompt": PROMPT, "messages": None}
    assert (await http.post("/tokenize", json=nothing_else)).json() == read
    answer = await chat(openai_client, model, max_tokens=1)
    assert answer.usage is not None
    assert turns["count"] == answer.usage.prompt_tokens


async def test_detail_1_usage_of_a_stream_comes_only_on_request_and_last(
    http: httpx.AsyncClient, model: str
) -> None:
    body = body_of(model, **GO_ON)
    plain = await events(http, "/v1/completions", body)
    assert all("usage" not in event for event in plain)
    asked: dict[str, Any] = {**body, "stream_options": {"include_usage": True}}
    told = await events(http, "/v1/completions", asked)
    assert all(event["usage"] is None and event["choices"] for event in told[:-1])
    assert told[-1]["choices"] == []
    assert told[-1]["usage"]["completion_tokens"] == 12
    asked["stream_options"]["continuous_usage_stats"] = True
    counted = [event["usage"] for event in await events(http, "/v1/completions", asked)]
    assert {usage["prompt_tokens"] for usage in counted} == {told[-1]["usage"]["prompt_tokens"]}
    assert [usage["completion_tokens"] for usage in counted[-2:]] == [12, 12]


async def test_detail_2_usage_sums_up_and_tells_what_was_cached(
    openai_client: openai.AsyncOpenAI, model: str
) -> None:
    prompt = " ".join(["bright"] * 40)
    for is_cached in (False, True):
        usage = (await complete(openai_client, model, prompt=prompt, max_tokens=3)).usage
        assert usage is not None
        assert usage.completion_tokens == 3
        assert usage.total_tokens == usage.prompt_tokens + 3
        assert usage.prompt_tokens_details is not None
        assert bool(usage.prompt_tokens_details.cached_tokens) == is_cached


async def test_details_3_and_4_of_a_chat_stream(http: httpx.AsyncClient, model: str) -> None:
    """The role comes with the first token; one piece alone has a reason to end."""
    body = {"model": model, "messages": MESSAGES, "temperature": 0, "max_tokens": 12, **GO_ON}
    read = await events(http, "/v1/chat/completions", body)
    choices = [event["choices"][0] for event in read]
    assert choices[0]["delta"]["role"] == "assistant"
    assert choices[0]["delta"]["content"]
    assert all("role" not in choice["delta"] for choice in choices[1:])
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == "length"
    assert len({(event["id"], event["created"], event["model"]) for event in read}) == 1
    assert {event["object"] for event in read} == {"chat.completion.chunk"}


async def test_details_9_and_10_stop_strings_are_held_across_tokens(
    openai_client: openai.AsyncOpenAI, http: httpx.AsyncClient, model: str
) -> None:
    whole = (await complete(openai_client, model, max_tokens=40)).choices[0].text
    stop = whole[len(whole) // 2 :][:5]
    expected = whole[: whole.index(stop)]
    for stops in (stop, ["never said by it", stop]):
        stopped = (await complete(openai_client, model, max_tokens=40, stop=stops)).choices[0]
        assert stopped.text == expected
        assert stopped.finish_reason == "stop"
    read = await events(http, "/v1/completions", body_of(model, max_tokens=40, stop=stop, **GO_ON))
    assert "".join(event["choices"][0]["text"] for event in read) == expected
    assert read[-1]["choices"][0]["stop_reason"] == stop


async def test_a_stop_string_may_be_part_of_the_text(
    openai_client: openai.AsyncOpenAI, model: str
) -> None:
    whole = (await complete(openai_client, model, max_tokens=40)).choices[0].text
    stop = whole[len(whole) // 2 :][:5]
    asked = {"stop": stop, "extra_body": {**GO_ON, "include_stop_str_in_output": True}}
    stopped = (await complete(openai_client, model, max_tokens=40, **asked)).choices[0]
    assert stopped.text == whole[: whole.index(stop)] + stop
    assert stopped.finish_reason == "stop"


async def test_detail_11_stop_tokens_end_and_do_not_show(
    http: httpx.AsyncClient, cluster: Cluster, model: str
) -> None:
    """One that the client named is told of; the model's own is its own affair."""
    async with cluster.client() as grpc:
        options = SamplingOptions(temperature=0, max_tokens=20, ignore_eos=True)
        chunks = [chunk async for chunk in grpc.generate(prompt=PROMPT, options=options)]
    token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
    last = next(token_id for token_id in token_ids[5:] if token_ids.index(token_id) >= 5)
    num_before = token_ids.index(last)
    said = (await http.post("/detokenize", json={"tokens": token_ids[:num_before]})).json()
    body = body_of(model, max_tokens=20, stop_token_ids=[last], **GO_ON)
    choice = (await http.post("/v1/completions", json=body)).json()["choices"][0]
    assert choice["text"] == said["prompt"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", last)


async def test_detail_15_how_many_tokens(
    openai_client: openai.AsyncOpenAI, http: httpx.AsyncClient, model: str
) -> None:
    completed = await complete(openai_client, model)
    assert completed.usage is not None
    assert completed.usage.completion_tokens == 16
    answered = await chat(openai_client, model)
    assert answered.usage is not None
    assert answered.usage.total_tokens == MAX_LEN
    short = await chat(openai_client, model, max_tokens=9, max_completion_tokens=3)
    assert short.usage is not None
    assert short.usage.completion_tokens == 3
    for name in ("max_tokens", "max_completion_tokens"):
        with pytest.raises(openai.BadRequestError) as caught:
            await chat(openai_client, model, **{name: MAX_LEN})
        assert caught.value.param == name
        assert "This model's maximum context length is 600 tokens" in str(caught.value)


@pytest.mark.parametrize("case", ERRORS)
async def test_detail_18_errors_have_openais_shape(
    http: httpx.AsyncClient, model: str, case: str
) -> None:
    content, status, param = ERRORS[case]
    error = await refused(http, content.replace(b"MODEL", model.encode()))
    assert (error["status"], error["param"]) == (status, param), error
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("case", CHAT_ERRORS)
async def test_detail_18_errors_of_chats_name_the_field(
    http: httpx.AsyncClient, model: str, case: str
) -> None:
    body, param = CHAT_ERRORS[case]
    content = json.dumps({"model": model, **body}).encode()
    error = await refused(http, content, "/v1/chat/completions")
    assert (error["status"], error["param"]) == (400, param), error


async def test_detail_18_what_is_not_served_at_all(http: httpx.AsyncClient, model: str) -> None:
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)):
        response = await http.request(method, path)
        assert response.status_code == status
        assert response.json()["error"]["type"] == "invalid_request_error"
        assert len(response.headers["x-request-id"]) == 32
    form = await http.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
    assert form.status_code == 415
    chunked = await http.post(
        "/v1/completions",
        content=endless(),
        headers={"content-type": "application/json"},
    )
    assert chunked.status_code == 413


async def endless() -> AsyncIterator[bytes]:
    for _ in range(100):
        yield b" " * 4096


async def test_detail_21_a_request_id_goes_both_ways(http: httpx.AsyncClient, model: str) -> None:
    body = body_of(model, max_tokens=1)
    given = await http.post("/v1/completions", json=body, headers={"x-request-id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    assert given.json()["id"] == "cmpl-mine-1"
    made = await http.post("/v1/completions", json={})
    assert made.status_code == 400
    assert len(made.headers["x-request-id"]) == 32
    wrong = await http.post("/v1/completions", json=body, headers={"x-request-id": "a b"})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "x-request-id"


async def test_detail_23_unknown_members_are_passed_over(
    openai_client: openai.AsyncOpenAI, model: str
) -> None:
    void = {"user": "me", "metadata": {"a": "b"}, "store": False, "n": 1, "prediction": None}
    answered = await chat(
        openai_client, model, max_tokens=3, extra_body={**GO_ON, **void, "new": [1]}
    )
    assert answered.choices[0].finish_reason == "length"


async def test_detail_22_health_and_metrics(http: httpx.AsyncClient, cluster: Cluster) -> None:
    assert (await http.get("/health")).status_code == 200
    text = (await http.get("/metrics")).text
    assert "diptych_requests_total" in text
    assert "diptych_router_proven_pairs 1.0" in text


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
NAMES = sorted(
    {*SERVED, *unserved.OF_CHAT, *unserved.OF_RESPONSE, "prompt", "messages", "input", "text"}
    | {"instructions", "tools", "tool_choice", "include", "stream", "stream_options"}
)
BODIES = st.binary(max_size=40) | st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4)


@given(path=st.sampled_from(["/completions", "/chat/completions", "/responses"]), body=BODIES)
@settings(max_examples=60, deadline=None)
async def test_no_body_is_a_servers_error(
    http: httpx.AsyncClient, model: str, path: str, body: bytes | dict[str, Any]
) -> None:
    if not isinstance(body, bytes):
        turns = MESSAGES[1:2]
        asked = {"prompt": "a", "messages": turns, "input": turns, "max_tokens": 2}
        whole = {"model": model, **asked, **body}
        body = json.dumps(whole).encode()
    headers = {"content-type": "application/json"}
    response = await http.post(f"/v1{path}", content=body, headers=headers)
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        assert response.json()["error"]["param"]


async def test_and_the_router_is_well_after_it(http: httpx.AsyncClient, model: str) -> None:
    assert (await http.get("/health")).status_code == 200
    answered = await http.post("/v1/completions", json=body_of(model))
    assert answered.status_code == 200

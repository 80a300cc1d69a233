"""Triton's own client on a router's public port, and what becomes of a stream that nobody ends."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from diptych.client import DiptychClient, SamplingOptions
from diptych.open_inference import service_pb2
from router.frontend.open_inference.tensors import INPUTS
from tests.integration import router_rig
from tests.integration.router_rig import Cluster, running
from tests.unit.router.frontend.open_inference.infer_requests import flag, request
from tests.waiting import within

PROMPT = "The small river carries another letter, and then"
TIMERS = router_rig.TIMERS.model_copy(update={"drain_s": 60.0})
OPTIONS = SamplingOptions(temperature=0, max_tokens=12, ignore_eos=True)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(wide_model: Path) -> AsyncIterator[Cluster]:
    async with running(wide_model, 1, 1) as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(cluster: Cluster) -> str:
    """The answer by our own client."""
    async with DiptychClient(cluster.address) as client:
        return "".join([c.text async for c in client.generate(PROMPT, options=OPTIONS)])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def told(cluster: Cluster, wide_model: Path) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.integration.clients.by_triton"),
        *(cluster.address, wide_model.name),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    read: dict[str, Any] = json.loads(output)
    return read


async def test_it_is_told_what_is_served(told: dict[str, Any]) -> None:
    described = told["described"]
    assert described["is_live"]
    assert described["is_ready"]
    assert (described["has_model"], described["has_another"]) == (True, False)
    assert described["server"] == "diptych"
    assert described["inputs"] == list(INPUTS)
    assert described["optional"] == [name for name in INPUTS if name != "text_input"]
    assert (described["is_decoupled"], described["max_batch_size"]) == (True, 0)


async def test_an_answer_is_what_our_own_client_gets(
    told: dict[str, Any], expected: str, wide_model: Path
) -> None:
    answers = told["answers"]
    assert answers["echoed"]["text_output"] == [PROMPT + expected]
    assert (answers["echoed"]["id"], answers["echoed"]["model"]) == ("mine", wide_model.name)
    assert answers["echoed"]["finish_reason"] == ["length"]
    assert answers["echoed"]["num_input_tokens"][0] > 5
    for name in ("alone", "by_parameters"):
        assert answers[name]["text_output"] == [expected]
        assert set(answers[name]) == {"id", "model", "text_output"}
    assert answers["choices"]["text_output"] == [expected, expected]
    assert answers["choices"]["finish_reason"] == ["length", "length"]


async def test_it_is_told_how_likely_tokens_were(told: dict[str, Any], cluster: Cluster) -> None:
    """The log probabilities that our own client gets, with the two likeliest at each place."""
    async with DiptychClient(cluster.address) as client:
        options = replace(OPTIONS, logprobs=2)
        chunks = [chunk async for chunk in client.generate(PROMPT, options=options)]
    token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
    expected = [found for chunk in chunks for found in chunk.logprobs]
    likely = told["answers"]["likely"]
    assert (
        likely["cumulative_logprob"]
        == [pytest.approx(sum(found.logprob for found in expected), abs=1e-4)] * 2
    )
    for written in likely["logprobs"]:
        places = json.loads(written)
        assert len(places) == len(token_ids) == 12
        for place, token_id, found in zip(places, token_ids, expected, strict=True):
            assert place[str(token_id)]["logprob"] == pytest.approx(found.logprob, abs=1e-4)
            ranks = {str(each): rank for rank, each in enumerate(found.top_token_ids, 1)}
            assert {each: told["rank"] for each, told in place.items() if told["rank"]} == ranks


async def test_its_sampling_parameters_reach_the_workers(
    told: dict[str, Any], cluster: Cluster
) -> None:
    sampled = [spec.sampling for spec in cluster.prefill[0].specs]
    assert sampled
    assert {(each.temperature, each.max_tokens) for each in sampled} == {(0.0, 12)}


@pytest.mark.parametrize(
    ("case", "status", "message"),
    [
        ("shape", "INVALID_ARGUMENT", "text_input.shape: should be [1]"),
        ("shared", "INVALID_ARGUMENT", "text_input.parameters.shared_memory_"),
        ("range", "INVALID_ARGUMENT", "sampling_parameters.top_p: must be"),
        ("stream", "INVALID_ARGUMENT", "stream: is only for ModelStreamInfer"),
        ("model", "NOT_FOUND", "no model 'another' here"),
        ("id", "INVALID_ARGUMENT", "id: must be"),
        ("sequence", "INVALID_ARGUMENT", "parameters.sequence_id: is not supported"),
        ("timeout", "DEADLINE_EXCEEDED", "deadline"),
        ("repository", "UNIMPLEMENTED", "RepositoryIndex is not served"),
        ("region", "UNIMPLEMENTED", "SystemSharedMemoryRegister is not served"),
        ("statistics", "UNIMPLEMENTED", "ModelStatistics is not served"),
    ],
)
async def test_a_refusal_names_what_is_wrong(
    told: dict[str, Any], case: str, status: str, message: str
) -> None:
    refused = told["refusals"][case]
    assert refused["status"] == f"StatusCode.{status}", refused
    assert message in refused["message"]


async def test_a_stream_has_several_answers_in_pieces(told: dict[str, Any], expected: str) -> None:
    errors = [each["error"] for each in told["stream"] if "error" in each]
    assert len(errors) == 1
    assert "REQUEST_INVALID: sampling_parameters.top_k" in errors[0]
    pieces = [each for each in told["stream"] if each.get("id") == "pieces"]
    assert "".join(each["text_output"][0] for each in pieces) == expected
    assert len(pieces) > 2
    assert sum(each["num_output_tokens"][0] for each in pieces) == 12
    assert [each["is_final"] for each in pieces] == [False] * (len(pieces) - 1) + [True]
    assert [each["finish_reason"][0] for each in pieces[-2:]] == ["None", "length"]
    (whole,) = [each for each in told["stream"] if each.get("id") == "whole"]
    assert whole["text_output"] == [PROMPT + expected]
    assert whole["is_final"]


async def test_its_own_example_is_answered(told: dict[str, Any], expected: str) -> None:
    for index in ("0", "1"):
        pieces = [each for each in told["example"] if each["id"] == index]
        assert "".join(each["text_output"][0] for each in pieces) == expected
        assert pieces[-1]["is_final"]


def asking(max_tokens: int, stream: bool = False) -> bytes:
    sampling: dict[str, Any] = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    made = request(flag("stream", stream), text=PROMPT, **sampling)
    made.model_name = ""  # the one that there is
    return made.SerializeToString()


def open_stream(cluster: Cluster) -> Any:
    """A call that takes requests as bytes, and is read and written by hand."""
    return cluster.channel.stream_stream(
        "/inference.GRPCInferenceService/ModelStreamInfer",
        request_serializer=None,
        response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
    )(None)


async def test_who_leaves_a_stream_frees_what_it_held(cluster: Cluster) -> None:
    call = open_stream(cluster)
    for _ in range(2):
        await call.write(asking(100_000, stream=True))
    assert not (await call.read()).error_message
    assert cluster.held()
    call.cancel()
    await cluster.wait_free()


async def test_what_is_no_message_ends_no_stream(cluster: Cluster, expected: str) -> None:
    call = open_stream(cluster)
    await call.write(b"\xff\xff")
    assert "REQUEST_INVALID: request: not valid protobuf" in (await call.read()).error_message
    await call.write(asking(12))
    await call.done_writing()
    (raw,) = (await call.read()).infer_response.raw_output_contents
    assert raw[4:].decode() == PROMPT + expected
    assert not isinstance(await call.read(), service_pb2.ModelStreamInferResponse)
    assert await call.code() is grpc.StatusCode.OK


async def test_a_router_that_drains_waits_for_no_idle_stream(wide_model: Path) -> None:
    async with running(wide_model, 1, 1, timers=TIMERS) as other:
        call = open_stream(other)
        await call.write(asking(1))
        assert not (await call.read()).error_message
        async with within(TIMERS.drain_s / 2):
            await other.stopped()

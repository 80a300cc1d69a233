"""How the cluster is told: made once an interval for all, over both front ends, or not at all."""

import json
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import cast

import pytest
from google.protobuf.json_format import MessageToDict
from prometheus_client import CollectorRegistry
from starlette.requests import Request

from diptych.errors import NotServedError
from diptych.rpc.server import Context
from diptych.telemetry.metrics import Metrics
from router.cluster.overview import Overview
from router.frontend.admission import Admission
from router.frontend.callers.callers import Anybody
from router.frontend.cluster_message import write_report
from router.frontend.cluster_view import INTERVAL_S, ClusterView
from router.frontend.generator import Generator
from router.frontend.grpc import InferenceServicer
from router.frontend.handed_over import HandedOver
from router.frontend.http.service import ServiceAnswers
from router.frontend.prompt_answers import PromptAnswers
from router.generation.cluster_report import (
    BlockReport,
    ClusterReport,
    LatencyReport,
    PairReport,
    WorkerReport,
)

REQUEST = Request({"type": "http", "headers": []})
WORKER = WorkerReport(
    address="d:1", state="ready", message="m", is_used=True,
    blocks=BlockReport(total=21, free=1, cached=2, running=3, reserved=4, leased=5, quarantined=6),
    num_running=7, num_waiting=8, max_num_seqs=9, num_pending_prefill_tokens=10,
    prefill_tokens_per_s=11.0, decode_step_s=0.5,
)  # fmt: skip
PAIR = PairReport(
    prefill="p:1",
    decode="d:1",
    state="proven",
    transport="nixl",
    bytes_per_s=2e9,
    num_pulls=3,
    way="VRAM of device 0 at the source, DRAM at the reader, staged at the source",
)
SEEN = Overview(1, 1, 1, (replace(WORKER, address="p:1"),), (WORKER,), (PAIR,))


class World:
    """A router's numbers, and a clock that stands still."""

    def __init__(self, *, is_told: bool = True) -> None:
        self.now_s = 100.0
        self.num_looks = 0
        metrics = Metrics(CollectorRegistry())
        self.ttft = metrics.loop_histogram("ttft_seconds", "T.", (1.0, 2.0))
        self.itl = metrics.loop_histogram("itl_seconds", "I.", (1.0, 2.0))
        self.view = ClusterView(
            "m",
            self._look,
            SimpleNamespace(num_waiting=2, num_placed=3, num_waiting_of=lambda each: 1),
            lambda: self.now_s,
            ttft=self.ttft,
            itl=self.itl,
            is_told=is_told,
        )
        admission = cast(Admission, SimpleNamespace())
        self.http = ServiceAnswers(admission, None, lambda: True, self.view)

    def _look(self) -> Overview:
        self.num_looks += 1
        return SEEN


async def test_it_is_made_once_an_interval_for_all_who_watch() -> None:
    world = World()
    for _ in range(100):
        await world.http.cluster(REQUEST)
        world.view.report()
    assert world.num_looks == 1
    world.now_s += INTERVAL_S
    bodies = {bytes((await world.http.cluster(REQUEST)).body) for _ in range(2)}
    assert (world.num_looks, len(bodies)) == (2, 1)


async def test_both_front_ends_say_the_same() -> None:
    world = World()
    world.ttft.observe(0.5)
    world.itl.observe(1.5, 9)
    response = await world.http.cluster(REQUEST)
    assert response.headers["cache-control"] == "no-store"
    told = json.loads(bytes(response.body))
    assert told == json.loads(json.dumps(asdict(world.view.report())))
    assert (told["num_output_tokens"], told["ttft"]["num_samples"]) == (10, 1)
    message = write_report(world.view.report())
    by_grpc = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    by_grpc["num_output_tokens"] = int(by_grpc["num_output_tokens"])  # 64 bits are text there
    for worker in (*by_grpc["prefill"], *by_grpc["decode"]):
        worker["num_pending_prefill_tokens"] = int(worker["num_pending_prefill_tokens"])
    by_grpc["pairs"][0]["num_pulls"] = int(by_grpc["pairs"][0]["num_pulls"])
    assert by_grpc == told


def test_latencies_are_of_the_last_half_minute() -> None:
    world = World()
    world.ttft.observe(0.5)
    for _ in range(6):
        world.view.remember()
    assert world.view.report().ttft == LatencyReport()
    assert world.view.report().num_output_tokens == 1, "that one is since the start"


async def test_where_it_is_not_told_nobody_looks() -> None:
    world = World(is_told=False)
    with pytest.raises(NotServedError):
        world.view.report()
    await world.view.run()  # has nothing to remember
    response = await world.http.cluster(REQUEST)
    assert response.status_code == 501
    assert json.loads(bytes(response.body))["error"]["code"] == "not_served"
    assert world.num_looks == 0


def test_nothing_in_it_is_of_one_request_or_tenant() -> None:
    """A field that is added has to be thought about here."""
    assert set(ClusterReport.__slots__) == {
        "model", "num_waiting", "num_placed", "num_output_tokens", "ttft", "itl", "num_prefill",
        "num_decode", "num_pairs", "prefill", "decode", "pairs",
    }  # fmt: skip
    assert set(WorkerReport.__slots__) == {
        "address", "state", "message", "is_used", "blocks", "num_running", "num_waiting",
        "max_num_seqs", "num_pending_prefill_tokens", "prefill_tokens_per_s", "decode_step_s",
    }  # fmt: skip


async def test_grpc_writes_a_report_once() -> None:
    world, nothing = World(), SimpleNamespace()
    servicer = InferenceServicer(
        cast(Admission, nothing),
        cast(Generator, nothing),
        cast(PromptAnswers, nothing),
        Anybody(),
        world.view,
        max_request_bytes=1,
        handed=HandedOver(2**20),
    )
    context = cast(Context, SimpleNamespace(invocation_metadata=tuple))
    first = await servicer.DescribeCluster(b"", context)
    assert await servicer.DescribeCluster(b"", context) is first
    world.now_s += INTERVAL_S
    again = await servicer.DescribeCluster(b"", context)
    assert (again is first, again) == (False, first)

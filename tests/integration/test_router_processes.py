"""A router of two processes as a user starts it: both answer, one is killed, one hangs, all end."""

import asyncio
import json
import signal
from pathlib import Path

import grpc
import httpx
import psutil

from diptych.v1 import inference_pb2, inference_pb2_grpc
from tests import metrics
from tests.cluster import Process
from tests.waiting import until

REFUSED = 'diptych_requests_total{outcome="REQUEST_INVALID"}'
SOON_S = 60.0


async def refused(address: str) -> None:
    """One request that is wrong, over a connection of its own."""
    alone = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=alone) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(inference_pb2.GenerateRequest())
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def reach_all(router: Process, addresses: list[str]) -> None:
    """Ask until each process has refused something; the kernel decides who is asked."""
    async with asyncio.timeout(SOON_S):
        while True:
            await refused(router.address)
            told = [metrics.scrape(address).get(REFUSED, 0) for address in addresses]
            if all(told):
                return


def metrics_of_all(tmp_path: Path) -> list[str]:
    found: list[str] = json.loads((tmp_path / "router.port.json").read_text())["metrics_addresses"]
    return found


async def test_two_processes_are_one_router(tiny_llama: Path, tmp_path: Path) -> None:
    flags = ["--model", str(tiny_llama), "--decode", "127.0.0.1:1", "--processes", "2"]
    flags += ["--timers.lost-peer-s", "3"]
    router = Process("router", "router", tmp_path, flags)
    router.start()
    try:
        await asyncio.to_thread(router.wait_listening)
        first = metrics_of_all(tmp_path)
        await reach_all(router, first)
        async with httpx.AsyncClient(base_url=f"http://{router.http_address}") as client:
            assert (await client.get("/v1/models")).status_code == 200
            assert (await client.get("/metrics")).status_code == 404  # whose would they be?
        children = psutil.Process(router.pid).children()
        assert len(children) == 2
        assert router.log_path.read_text().count('"settled"') == 2  # no collection stops streams
        children[0].kill()
        await until(lambda: metrics_of_all(tmp_path) != first, SOON_S, "none took its place")
        assert "another takes its place" in router.log_path.read_text()
        await reach_all(router, metrics_of_all(tmp_path))
        second = metrics_of_all(tmp_path)
        psutil.Process(router.pid).children()[0].suspend()
        await until(lambda: metrics_of_all(tmp_path) != second, SOON_S, "it hangs on")
        assert "hangs: it is killed" in router.log_path.read_text()
        await reach_all(router, metrics_of_all(tmp_path))
        children = psutil.Process(router.pid).children()
        assert len(children) == 2
        router.signal(signal.SIGINT)
        assert await asyncio.to_thread(router.wait_ended) == 0
        assert not any(child.is_running() for child in children)
    finally:
        router.stop()

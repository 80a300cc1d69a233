"""Worker processes as their supervisor sees them: exit codes, signals, an engine that dies."""

import asyncio
import signal
import threading
import time
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2

from diptych.engine.engine import MAX_FAILED_STEPS
from diptych.engine.runner import Runner
from diptych.engine.scheduling.step import StepOutput, StepPlan
from diptych.errors import DiptychError
from diptych.process import StuckThreadError, UnfinishedStartError
from diptych.rpc.channel import open_channel
from diptych.service_host import ServiceHost
from diptych.timers import Timers
from diptych.v1 import worker_pb2
from diptych.worker import worker as worker_module
from diptych.worker.audit import BlockAudit
from diptych.worker.worker import EngineDiedError
from prefill_worker import app as prefill_app
from prefill_worker.config import PrefillWorkerConfig
from tests.cluster import Process
from tests.hanging import hang_later
from tests.integration.worker_rig import (
    INLINE,
    PATIENCE_S,
    Lease,
    Settings,
    Worker,
    prefill_worker,
)
from tests.prompts import prompt
from tests.waiting import Patience, within

ARGS = ["--num-threads", "1", "--num-blocks", "32", "--transfer.transports", "inline"]
SETTINGS: Settings = {"num_blocks": 32, "max_model_len": 256, "transfer": INLINE}


def process(role: str, model: Path, tmp_path: Path, *args: str) -> Process:
    return Process(f"{role}_worker", role, tmp_path, ["--model", str(model), *ARGS, *args])


def exit_code(worker: Process, within_s: float = 30) -> int:
    """Wait until it ends by itself."""
    patience = Patience(within_s)
    while worker.alive:
        assert not patience.is_over(), f"still alive:\n{worker.log_tail()}"
        time.sleep(0.02)
    return worker.stop()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_sigterm_ends_with_0(tiny_llama: Path, tmp_path: Path, role: str) -> None:
    worker = process(role, tiny_llama, tmp_path)
    worker.start()
    worker.wait_listening()  # it is still loading
    assert worker.stop() == 0, worker.log_tail()
    worker.start()
    worker.wait_listening()
    deadline = time.monotonic() + 30
    while "SERVING_STATE_READY" not in worker.log_tail():
        assert time.monotonic() < deadline, worker.log_tail()
        time.sleep(0.05)
    assert '"settled"' in worker.log_tail()  # no collection stops its streams from here on
    assert worker.stop() == 0, worker.log_tail()
    assert "error" not in worker.log_tail()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "/nowhere"], "model '/nowhere'"),
        (["--max-model-len", "100000"], "max_model_len: 100000"),
        (["--cpus", "900"], "cpus: 900"),
    ],
)
def test_a_wrong_setting_is_one_line_and_2(
    tiny_llama: Path, tmp_path: Path, args: list[str], message: str
) -> None:
    worker = process("decode", tiny_llama, tmp_path, *args)
    worker.start()
    assert exit_code(worker) == 2
    (line,) = (each for each in worker.log_tail().splitlines() if not each.startswith("{"))
    assert message in line
    assert "Traceback" not in worker.log_tail()


async def test_a_second_signal_does_not_wait(tiny_llama: Path, tmp_path: Path) -> None:
    worker = process("prefill", tiny_llama, tmp_path)
    worker.start()
    worker.wait_listening()
    async with open_channel(worker.address) as channel:
        nobody = asyncio.get_running_loop().create_task(asyncio.sleep(0))
        view = Worker(worker.address, worker.metrics_address, channel, asyncio.Event(), nobody)
        await view.wait_ready()
        lease = Lease(view)
        await lease.start(prompt(20))
        await lease.next("accepted")
        await lease.grant("somebody")
        worker.signal(signal.SIGTERM)
        await view.watch_until(lambda s: s.state == worker_pb2.SERVING_STATE_DRAINING)
        assert worker.alive
        worker.signal(signal.SIGTERM)
        assert await asyncio.to_thread(exit_code, worker, 5) == 128 + signal.SIGTERM
        with pytest.raises(DiptychError):
            await lease.error()


async def test_sigterm_ends_a_worker_whose_step_hangs(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = hang_later(monkeypatch, "prefill.port.json", tmp_path)
    timers = ("--timers.heartbeat-s", "0.2", "--timers.lost-peer-s", "1")
    worker = process("prefill", tiny_llama, tmp_path, *timers)
    worker.start()
    worker.wait_listening()
    async with open_channel(worker.address) as channel:
        nobody = asyncio.get_running_loop().create_task(asyncio.sleep(0))
        view = Worker(worker.address, worker.metrics_address, channel, asyncio.Event(), nobody)
        await view.wait_ready()
        flag.touch()
        lease = Lease(view)
        await lease.start(prompt(20))
        await lease.next("accepted")
        worker.signal(signal.SIGTERM)
        assert await asyncio.to_thread(exit_code, worker, 10) == 1, worker.log_tail()
        assert "the model thread is stuck" in worker.log_tail(100)
        with pytest.raises(DiptychError):
            await lease.error()


@pytest.mark.parametrize("second", ["while it tells", "before it is noticed"])
async def test_a_second_failure_does_not_keep_a_worker_whose_step_hangs(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: str
) -> None:
    hangs, goes_on = threading.Event(), threading.Event()

    def hanging(self: Runner, plan: StepPlan) -> StepOutput:
        hangs.set()
        goes_on.wait()
        return StepOutput(tokens=(), duration_s=0.0)

    def broken(*args: object) -> None:
        raise ValueError("the second failure")

    async def broken_audit(self: BlockAudit) -> None:
        await asyncio.to_thread(hangs.wait)
        broken()

    if second == "while it tells":
        monkeypatch.setattr(ServiceHost, "set_failed", broken)
    else:
        monkeypatch.setattr(BlockAudit, "run", broken_audit)

    async def serve_and_hang() -> None:
        timers = Timers(heartbeat_s=0.1, lost_peer_s=0.5)
        async with prefill_worker(tiny_llama, tmp_path, SETTINGS, timers=timers) as worker:
            monkeypatch.setattr(Runner, "execute", hanging)
            lease = Lease(worker)
            await lease.start(prompt(20))
            await asyncio.wait([worker.serving], timeout=PATIENCE_S)
            assert worker.serving.done()

    try:
        with pytest.raises(ExceptionGroup) as caught:
            await serve_and_hang()
    finally:
        goes_on.set()
    assert caught.group_contains(ValueError, match="the second failure")
    assert caught.group_contains(StuckThreadError)


async def test_a_worker_that_is_stopped_does_not_wait_for_a_load_that_hangs(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(worker_module, "load_model", lambda *asked: goes_on.wait())
    config = PrefillWorkerConfig(
        model=str(tiny_llama), port_file=tmp_path / "port.json", timers=Timers(drain_s=3600.0)
    )
    stop = asyncio.Event()
    try:
        with pytest.raises(UnfinishedStartError, match="loading the model"):
            async with within(PATIENCE_S):
                await prefill_app.serve(config, stop, lambda port: stop.set())
    finally:
        goes_on.set()


async def test_a_dead_engine_takes_the_process_down(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Runner, plan: StepPlan) -> StepOutput:
        raise RuntimeError("the device is gone")

    async def serve_and_break() -> None:
        async with prefill_worker(tiny_llama, tmp_path, SETTINGS) as worker:
            monkeypatch.setattr(Runner, "execute", broken)
            for _ in range(MAX_FAILED_STEPS - 1):
                lease = Lease(worker)
                await lease.start(prompt(20))
                await lease.next("accepted")
                with pytest.raises(DiptychError, match="a model step failed"):
                    await lease.error()
                assert await worker.health() == health_pb2.HealthCheckResponse.SERVING
            await worker.wait_baseline()
            lease = Lease(worker)
            await lease.start(prompt(20))
            await lease.next("accepted")
            await worker.watch_until(lambda s: s.state == worker_pb2.SERVING_STATE_FAILED)
            assert await worker.health() == health_pb2.HealthCheckResponse.NOT_SERVING
            with pytest.raises(DiptychError):
                await lease.error()
            await asyncio.wait([worker.serving], timeout=5)

    with pytest.raises(ExceptionGroup) as caught:
        await serve_and_break()
    assert caught.group_contains(EngineDiedError)

"""A prefill worker over real gRPC: the stream is the lease."""

import asyncio
import contextlib
import threading
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from diptych.engine.runner import Runner
from diptych.engine.scheduling.scheduler import Scheduler
from diptych.engine.scheduling.sequence import Sequence
from diptych.engine.scheduling.step import StepOutput, StepPlan
from diptych.errors import (
    BlocksExhaustedError,
    InvalidRequestError,
    LeaseExpiredError,
    RouterLostError,
    WorkerDrainingError,
)
from diptych.rpc.channel import open_channel
from diptych.text.identity import text_digest
from diptych.v1 import common_pb2, prefill_pb2, worker_pb2
from tests import hf_reference
from tests.integration.worker_rig import (
    BLOCK_SIZE,
    INLINE,
    MAX_LEN,
    PATIENCE_S,
    Lease,
    Settings,
    Worker,
    prefill_worker,
    quick,
)
from tests.prompts import prompt
from tests.waiting import within

SIZE = 32  # tokens of a prompt, two blocks
SETTINGS: Settings = {
    "num_blocks": 32,
    "max_model_len": MAX_LEN,
    "block_size": BLOCK_SIZE,
    "max_batched_tokens": 64,
    "transfer": INLINE,
}


async def test_first_token_and_lease(tiny_llama: Path, tmp_path: Path) -> None:
    tokens = prompt(100)
    expected = hf_reference.greedy(tiny_llama, tokens, 1).token_ids[0]
    async with prefill_worker(tiny_llama, tmp_path, SETTINGS) as worker:
        state = await worker.state()
        assert state.role == worker_pb2.WORKER_ROLE_PREFILL
        assert state.max_model_len == MAX_LEN
        assert state.text_digest == text_digest(tiny_llama) != ""
        assert state.max_num_seqs > 0
        assert state.layout.block_size == BLOCK_SIZE
        assert state.blocks.total == state.blocks.free == 32
        assert await worker.health("diptych.v1.Prefill") == health_pb2.HealthCheckResponse.SERVING

        lease = Lease(worker)
        await lease.start(tokens, margins=True)
        accepted = (await lease.next("accepted")).accepted
        assert accepted.incarnation == state.incarnation
        assert accepted.num_cached_tokens == 0
        first = (await lease.next("first_token")).first_token
        assert first.token_id == expected
        assert first.position == len(tokens)
        assert first.margin > 0
        assert first.finish_reason == common_pb2.FINISH_REASON_UNSPECIFIED
        await lease.grant("somebody")
        assert (await worker.blocks())["leased"] == 7
        assert (await worker.metrics())["diptych_kv_tickets_valid"] == 1
        await lease.close()
        await worker.wait_baseline()
        assert (await worker.blocks())["cached"] == 6

        again = Lease(worker)
        await again.start(tokens)
        accepted = (await again.next("accepted")).accepted
        assert accepted.num_cached_tokens == 6 * BLOCK_SIZE
        assert (await again.next("first_token")).first_token.token_id == first.token_id
        again.call.cancel()
        await worker.wait_baseline()
        metrics = await worker.metrics()
        why = ("released", "cancelled")  # a cancel may look like a half-close
        assert sum(metrics[f'diptych_leases_ended_total{{why="{w}"}}'] for w in why) == 2
        assert metrics["diptych_leases_open"] == 0
        assert metrics["diptych_engine_steps_total"] >= 3


async def test_one_token_ends_the_sequence(tiny_llama: Path, tmp_path: Path) -> None:
    async with prefill_worker(tiny_llama, tmp_path, SETTINGS) as worker:
        lease = Lease(worker)
        await lease.start(prompt(20), max_tokens=1)
        await lease.next("accepted")
        first = (await lease.next("first_token")).first_token
        assert first.finish_reason == common_pb2.FINISH_REASON_LENGTH
        await lease.close()
        await worker.wait_baseline()


async def test_cancel_while_computing(tiny_llama: Path, tmp_path: Path) -> None:
    settings = {**SETTINGS, "max_batched_tokens": 4, "max_num_seqs": 4}
    async with prefill_worker(tiny_llama, tmp_path, settings) as worker:
        for _ in range(3):
            lease = Lease(worker)
            await lease.start(prompt(200))
            await lease.next("accepted")
            lease.call.cancel()
        await worker.wait_baseline()
        assert (await worker.state()).num_waiting == 0


async def test_a_channel_that_breaks_frees_its_leases(tiny_llama: Path, tmp_path: Path) -> None:
    async with prefill_worker(tiny_llama, tmp_path, SETTINGS) as worker:
        other = open_channel(worker.address)
        lease = Lease(Worker(worker.address, "", other, worker.stop, worker.serving))
        await lease.start(prompt(100))
        await lease.next("accepted")
        await other.close(None)
        await worker.wait_baseline()


async def test_an_unbound_lease_expires_and_a_granted_one_stays(
    tiny_llama: Path, tmp_path: Path
) -> None:
    timers = quick(unbound_lease_s=0.2)
    async with prefill_worker(tiny_llama, tmp_path, SETTINGS, timers=timers) as worker:
        unbound, granted = Lease(worker), Lease(worker)
        await unbound.start(prompt(40, seed=1))
        await granted.start(prompt(40, seed=2))
        await granted.next("accepted")
        await granted.next("first_token")
        await granted.grant("somebody")
        await unbound.next("accepted")
        await unbound.next("first_token")
        with pytest.raises(LeaseExpiredError):
            await unbound.error()
        await worker.wait_blocks(lambda b: b["leased"] == 3, "the granted lease stays")
        await asyncio.sleep(0.3)
        assert (await worker.blocks())["leased"] == 3
        await granted.close()
        await worker.wait_baseline()


async def test_a_silent_router_is_lost(tiny_llama: Path, tmp_path: Path) -> None:
    timers = quick(heartbeat_s=0.1, lost_peer_s=0.5)
    async with prefill_worker(tiny_llama, tmp_path, SETTINGS, timers=timers) as worker:
        silent, alive = Lease(worker), Lease(worker)
        for lease in (silent, alive):
            await lease.start(prompt(40, seed=lease.sequence_id))
            await lease.next("accepted")
            await lease.next("first_token")
            await lease.grant("somebody")
        beat = prefill_pb2.PrefillCommand(heartbeat=common_pb2.Heartbeat())
        for _ in range(10):
            await alive.call.write(beat)
            event = await alive.next("heartbeat")
            assert event.heartbeat.progress.num_steps > 0
            await asyncio.sleep(0.1)
        with pytest.raises(RouterLostError):
            await silent.error()
        await worker.wait_blocks(lambda b: b["leased"] == 3, "only the silent one is freed")
        await alive.close()
        await worker.wait_baseline()
        assert (await worker.metrics())['diptych_leases_ended_total{why="lost_router"}'] == 1


async def test_full_is_refused_at_once(tiny_llama: Path, tmp_path: Path) -> None:
    async with prefill_worker(tiny_llama, tmp_path, SETTINGS) as worker:
        held = [Lease(worker), Lease(worker)]
        for seed, lease in enumerate(held):
            await lease.start(prompt(240, seed=seed))
            await lease.next("accepted")
        refused = Lease(worker)
        await refused.start(prompt(240, seed=7))
        with pytest.raises(BlocksExhaustedError):
            await refused.next("accepted")
        for lease in held:
            await lease.close()
        await worker.wait_baseline()


async def test_a_payers_first_prompt_passes_those_of_another(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step computes one prompt; the first one waits until all have come."""
    all_came, execute = threading.Event(), Runner.execute

    def execute_then(self: Runner, plan: StepPlan) -> StepOutput:
        assert all_came.wait(PATIENCE_S)
        return execute(self, plan)

    payers, served = [b"a"] * 10 + [b"b"], list[bytes]()

    async def first_token(lease: Lease, payer: bytes) -> None:
        await lease.next("first_token")
        served.append(payer)

    settings = {**SETTINGS, "max_batched_tokens": SIZE, "max_num_seqs": SIZE, "num_blocks": 64}
    async with prefill_worker(tiny_llama, tmp_path, settings) as worker:
        monkeypatch.setattr(Runner, "execute", execute_then)
        leases = [Lease(worker) for _ in payers]
        async with asyncio.TaskGroup() as tasks:
            for seed, (lease, payer) in enumerate(zip(leases, payers, strict=True)):
                await lease.start(prompt(SIZE, seed=seed), payer=payer)
                await lease.next("accepted")
                tasks.create_task(first_token(lease, payer))
            all_came.set()
        assert sorted(served) == payers
        assert b"b" in served[:5], served
        for lease in leases:
            await lease.close()
        await worker.wait_baseline()


@pytest.mark.parametrize(
    ("token_ids", "field"),
    [
        ([], "spec.token_ids"),
        ([5, 100_000], "spec.token_ids[1]"),
        (list(range(3, 3 + MAX_LEN)), "spec.token_ids"),
    ],
)
async def test_nonsense_is_refused_by_field(
    tiny_llama: Path, tmp_path: Path, token_ids: list[int], field: str
) -> None:
    async with prefill_worker(tiny_llama, tmp_path, SETTINGS) as worker:
        lease = Lease(worker)
        await lease.start(token_ids)
        with pytest.raises(InvalidRequestError) as caught:
            await lease.next("accepted")
        assert caught.value.field == field
        early = Lease(worker)
        with pytest.raises(InvalidRequestError):
            await early.grant("somebody")
        await worker.wait_baseline()


async def test_a_reason_reaches_a_router_that_is_sending(tiny_llama: Path, tmp_path: Path) -> None:
    """A status that meets a message on its way is lost; Ended is not."""
    beat = prefill_pb2.PrefillCommand(heartbeat=common_pb2.Heartbeat())
    async with prefill_worker(tiny_llama, tmp_path, SETTINGS) as worker:
        for _ in range(20):
            lease = Lease(worker)
            await lease.start([])

            async def send(lease: Lease = lease) -> None:
                with contextlib.suppress(grpc.aio.AioRpcError):  # ended meanwhile
                    for _ in range(50):
                        await lease.call.write(beat)

            async with asyncio.TaskGroup() as tasks:
                sending = tasks.create_task(send())
                with pytest.raises(InvalidRequestError):
                    await lease.next("accepted")
                sending.cancel()
        await worker.wait_baseline()


async def test_drain_lets_leases_finish(tiny_llama: Path, tmp_path: Path) -> None:
    async with prefill_worker(tiny_llama, tmp_path, SETTINGS) as worker:
        lease = Lease(worker)
        await lease.start(prompt(100))
        await lease.next("accepted")
        worker.stop.set()
        await worker.watch_until(lambda s: s.state == worker_pb2.SERVING_STATE_DRAINING)
        assert await worker.health() == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await worker.health("") == health_pb2.HealthCheckResponse.SERVING, "it lives"
        refused = Lease(worker)
        await refused.start(prompt(10))
        with pytest.raises(WorkerDrainingError):
            await refused.next("accepted")
        await lease.next("first_token")
        await lease.grant("somebody")
        assert not worker.serving.done()
        await lease.close()
        async with within(3):
            await asyncio.wait([worker.serving])
        await worker.serving


async def test_drain_ends_what_does_not_finish(tiny_llama: Path, tmp_path: Path) -> None:
    timers = quick(drain_s=0.2)
    async with prefill_worker(tiny_llama, tmp_path, SETTINGS, timers=timers) as worker:
        lease = Lease(worker)
        await lease.start(prompt(100))
        await lease.next("accepted")
        await lease.next("first_token")
        await lease.grant("somebody")
        worker.stop.set()
        with pytest.raises(WorkerDrainingError):
            await lease.error()
        async with within(3):
            await asyncio.wait([worker.serving])


async def test_a_leaked_block_fails_the_health_check(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with prefill_worker(tiny_llama, tmp_path, SETTINGS) as worker:
        lease = Lease(worker)
        await lease.start(prompt(20))
        await lease.next("first_token")
        release = Scheduler.release

        def leak(self: Scheduler, seq: Sequence) -> None:
            seq.block_table.pop()
            release(self, seq)

        monkeypatch.setattr(Scheduler, "release", leak)
        await lease.close()
        failed = await worker.watch_until(
            lambda state: state.state == worker_pb2.SERVING_STATE_FAILED
        )
        assert "leased 1" in failed.message
        assert await worker.health() == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await worker.health("") == health_pb2.HealthCheckResponse.NOT_SERVING, "end it"
        assert (await worker.metrics())["diptych_kv_block_mismatches_total"] == 1


async def test_who_is_stopped_does_not_wait_for_a_transport_that_hangs_as_it_is_opened(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens, goes_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hanging(name: str, place: object) -> None:
        loop.call_soon_threadsafe(opens.set)
        goes_on.wait()

    monkeypatch.setattr("kvtransfer.endpoint.open_transport", hanging)
    monkeypatch.setattr("kvtransfer.endpoint._CLOSE_S", 0.1)
    try:
        async with (
            prefill_worker(tiny_llama, tmp_path, SETTINGS, wait_ready=False),
            within(PATIENCE_S),
        ):
            await opens.wait()
    finally:
        goes_on.set()

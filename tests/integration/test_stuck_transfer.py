"""A transfer thread that is stuck in a call: every wait for it has an end."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2

from diptych.timers import Timers
from diptych.v1 import decode_pb2, worker_pb2
from diptych.worker.transfer_watch import TransferStuckError
from kvtransfer import endpoint as endpoint_module
from kvtransfer.endpoint import TransferEndpoint
from kvtransfer.memory import HostMemory
from kvtransfer.reader.fetch_driver import MAX_UNWRITTEN_MESSAGES
from kvtransfer.reader.pull_machine import PullError, PullRequest
from tests.integration.transfer_rig import (
    BLOCK_SIZE,
    Reader,
    Source,
    config,
    open_reader,
    open_source,
)
from tests.integration.worker_rig import INLINE, Lease, prefill_worker
from tests.prompts import prompt
from tests.waiting import until

BLOCKS = list(range(3 * MAX_UNWRITTEN_MESSAGES))
LOCAL = list(reversed(BLOCKS))
NUM_TOKENS = len(BLOCKS) * BLOCK_SIZE
# A fifth of the defaults: a peer is lost sooner than a pull that stands still.
TIMERS = Timers(heartbeat_s=0.2, lost_peer_s=0.9, read_progress_s=1.0, confirm_s=0.4)


@contextlib.contextmanager
def stuck(endpoint: TransferEndpoint) -> Iterator[None]:
    """While open, the thread is in one call."""
    release = threading.Event()

    def hang() -> None:
        release.wait()

    endpoint.thread.post(hang)
    try:
        yield
    finally:
        release.set()


@contextlib.asynccontextmanager
async def leased() -> AsyncIterator[tuple[Source, Reader, bytes, PullRequest]]:
    """A pair, what lies in the leased blocks, and the request for them.

    Each block is a message of its own: far more of them than are taken in before they land.
    """
    settings = config("inline", inline_message_bytes=4096)
    async with (
        open_source(settings, timers=TIMERS) as source,
        open_reader(settings, timers=TIMERS) as reader,
    ):
        await reader.connect(source)
        content = source.fill(BLOCKS)
        ticket = source.lease("lease", BLOCKS, NUM_TOKENS, "reader")
        yield source, reader, content, reader.request(source, ticket, NUM_TOKENS, LOCAL)


async def failure_of(reader: Reader, request: PullRequest) -> PullError:
    with pytest.raises(PullError) as excinfo:
        await reader.pairs.open_pull(request).run()
    return excinfo.value


async def test_a_source_that_cannot_take_digests_loses_its_readers_and_heals() -> None:
    async with leased() as (source, reader, content, request):
        async with asyncio.TaskGroup() as tasks:
            half = len(BLOCKS) // 2
            source.leases.announce("lease", half * BLOCK_SIZE)
            failing = tasks.create_task(failure_of(reader, request))
            await until(lambda: reader.content(LOCAL[:half]) == source.content(BLOCKS[:half]))
            with stuck(source.endpoint):  # what landed is all the reader knows of
                source.leases.announce("lease", NUM_TOKENS)
                error = await failing
                assert error.failure == decode_pb2.PULL_FAILURE_SOURCE_LOST
                assert "transfer thread is stuck" in error.message
                assert all(
                    pair.state != worker_pb2.PAIR_STATE_PROVEN for pair in reader.pairs.pairs()
                )
                await reader.wait_for(source.key, worker_pb2.PAIR_STATE_FAILED)
        await reader.wait_for(source.key, worker_pb2.PAIR_STATE_PROVEN)
        await reader.pairs.open_pull(request).run()  # the lease is what it was
        assert reader.content(LOCAL) == content


async def test_a_reader_that_cannot_read_fails_its_pulls_and_heals() -> None:
    async with leased() as (source, reader, content, request):
        source.leases.announce("lease", NUM_TOKENS)
        with stuck(reader.endpoint):
            error = await failure_of(reader, request)
            assert error.failure == decode_pb2.PULL_FAILURE_TRANSPORT
            # it may still write what was taken in
            assert reader.quarantined == set(LOCAL[:MAX_UNWRITTEN_MESSAGES])
            error = await failure_of(reader, request)
            assert error.failure == decode_pb2.PULL_FAILURE_NOT_CONNECTED
            pair = await reader.wait_for(source.key, worker_pb2.PAIR_STATE_FAILED)
            assert "the transfer thread has not answered" in pair.message
        await until(lambda: not reader.quarantined)
        await reader.wait_for(source.key, worker_pb2.PAIR_STATE_PROVEN)
        await reader.pairs.open_pull(request).run()
        assert reader.content(LOCAL) == content


async def test_a_worker_says_so_and_ends_if_it_stays_stuck(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_module, "_CLOSE_S", 0.1)
    goes_on = threading.Event()

    digests = HostMemory.digests

    def late_digests(*args: Any) -> object:
        goes_on.wait()
        return digests(*args)

    monkeypatch.setattr(HostMemory, "digests", late_digests)
    timers = Timers(heartbeat_s=0.1, read_progress_s=0.3, drain_s=0.6)

    async def serve_and_hang() -> None:
        settings = {"num_blocks": 32, "max_model_len": 256, "transfer": INLINE, "timers": timers}
        async with prefill_worker(tiny_llama, tmp_path, settings) as worker:
            lease = Lease(worker)
            await lease.start(prompt(20))
            told = await worker.watch_until(lambda state: "stuck" in state.message)
            assert told.state == worker_pb2.SERVING_STATE_STARTING
            assert await worker.health() == health_pb2.HealthCheckResponse.NOT_SERVING
            goes_on.set()
            await worker.watch_until(lambda s: s.state == worker_pb2.SERVING_STATE_READY)
            assert await worker.health() == health_pb2.HealthCheckResponse.SERVING
            goes_on.clear()
            other = Lease(worker)
            await other.start(prompt(20, seed=2))
            await worker.watch_until(lambda s: s.state == worker_pb2.SERVING_STATE_FAILED)
            await asyncio.wait([worker.serving], timeout=5)
            assert worker.serving.done()

    try:
        with pytest.raises(ExceptionGroup) as caught:
            await serve_and_hang()
    finally:
        goes_on.set()
    assert caught.group_contains(TransferStuckError)

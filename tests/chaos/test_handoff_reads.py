"""Reads that land after their pull is over, or never end: no one else is given their blocks."""

import asyncio
import signal
from collections.abc import Awaitable
from pathlib import Path

import grpc
import psutil
import pytest

from diptych.rpc.channel import open_channel
from diptych.v1 import inference_pb2_grpc
from tests.call import token_request
from tests.chaos.fault_rig import (
    Prompts,
    Rule,
    breakable_cluster,
    check_untouched,
    report,
    set_rules,
)
from tests.cluster import Cluster, Process
from tests.transports import TRANSPORTS, UCXX
from tests.waiting import within

NUM_LEFT = 6  # requests whose client leaves while they are read
TCP = {"transfer.ucx-tls": "tcp,cuda_copy", "transfer.allow-nixl-tcp": ""}
SMALL = {"num-blocks": "96"}  # what is left of it is used again and again
PATIENT = {"transfer.quarantine-max-s": "60", "transfer.quarantine-max-ratio": "1"}
HASTY = {"transfer.quarantine-max-s": "1", "transfer.quarantine-max-ratio": "1"}
KINDS = {
    "inline": ("inline", {}),
    "nixl": ("nixl", {}),
    "nixl-tcp": ("nixl", TCP),
    "ucxx": ("ucxx", {}),
}


async def until_reading(decode: Process) -> None:
    """Half of the reads are under way."""
    async with within(10):
        while (await report(decode)).num_reads_unfinished < NUM_LEFT // 2:
            await asyncio.sleep(0.02)


async def leave(channel: grpc.aio.Channel, prompts: Prompts, when: Awaitable[None]) -> None:
    """Send requests and cancel them all once ``when`` is over."""
    stub = inference_pb2_grpc.InferenceStub(channel)
    calls = [
        stub.Generate(token_request(ids, max_tokens=8, salt="left"), timeout=30)
        for ids in prompts.token_ids[:NUM_LEFT]
    ]
    await when
    for call in calls:
        call.cancel()


def teardowns(worker: Process) -> int:
    return int(worker.metric("diptych_kv_agent_teardowns"))


async def until_quarantined(cluster: Cluster, decode: Process, step_s: float) -> None:
    await cluster.eventually(
        lambda: decode.blocks()["quarantined"] > 0, 1 + step_s, "blocks are quarantined"
    )


async def learn(cluster: Cluster, channel: grpc.aio.Channel) -> Prompts:
    await cluster.wait_ready()
    prompts = Prompts(20)
    await prompts.learn(channel)
    return prompts


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["nixl-tcp", *TRANSPORTS])
async def test_late_landing_writes_nobody_elses_block(
    tiny_model: Path, tmp_path: Path, kind: str, step_s: float, chaos_long: bool
) -> None:
    transport, tcp = KINDS[kind]
    flags = {**SMALL, **tcp, **PATIENT, "timers.read-progress-s": "5"}
    late: list[Rule] = [
        {"at": "read", "do": do, "nth": nth, "seconds": 1, "seconds_max": 2, "times": None}
        for nth, do in ((1, "delay"), (2, "linger"), (3, "delay"))
    ]
    with breakable_cluster(tmp_path, tiny_model, transport, worker_flags=flags) as cluster:
        decode = cluster.decode[0]
        async with open_channel(cluster.router.address) as channel:
            prompts = await learn(cluster, channel)
            for _ in range(20 if chaos_long else 1):
                await set_rules(decode, late)
                await leave(channel, prompts, until_reading(decode))
                await set_rules(decode, [])  # what was begun goes on
                await until_quarantined(cluster, decode, step_s)
                while (await report(decode)).num_reads_unfinished:
                    prompts.check(await prompts.ask(channel, concurrency=4), "beside late reads")
                await check_untouched(cluster, step_s)
        assert teardowns(decode) == 0


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_read_that_never_ends_is_reclaimed_with_its_agent(
    tiny_model: Path, tmp_path: Path, transport: str, step_s: float, chaos_long: bool
) -> None:
    hang: list[Rule] = [{"at": "read", "do": "hang", "times": 3}]
    with breakable_cluster(
        tmp_path, tiny_model, transport, worker_flags={**SMALL, **HASTY}
    ) as cluster:
        decode = cluster.decode[0]
        async with open_channel(cluster.router.address) as channel:
            prompts = await learn(cluster, channel)
            for number in range(1, 21 if chaos_long else 2):
                await set_rules(decode, hang)
                async with asyncio.TaskGroup() as tasks:
                    asked = tasks.create_task(prompts.ask(channel, NUM_LEFT))
                    await until_reading(decode)
                    await cluster.eventually(  # read-progress-s, and as long as the others take
                        lambda: decode.blocks()["quarantined"] > 0, 10, "blocks are quarantined"
                    )
                    assert (await report(decode)).num_reads_unfinished == 3
                    assert teardowns(decode) == number - 1
                prompts.check(asked.result(), "hanging")
                await cluster.eventually(
                    lambda: not decode.blocks()["quarantined"], 5, "the quarantine is reclaimed"
                )
                assert teardowns(decode) == number
                await check_untouched(cluster, step_s)
                await cluster.wait_ready()
                prompts.check(await prompts.ask(channel), "after the teardown")
        await check_untouched(cluster, step_s)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["nixl-tcp", UCXX])
async def test_a_stopped_source_over_tcp_leaves_reads_that_teardown_ends(
    tiny_model: Path, tmp_path: Path, kind: str, step_s: float
) -> None:
    """The library's own unfinished reads: the source and its agent stop before they are posted."""
    transport, tcp = KINDS[kind]
    with breakable_cluster(
        tmp_path, tiny_model, transport, worker_flags={**SMALL, **tcp, **HASTY}
    ) as cluster:
        source, decode = cluster.prefill[0], cluster.decode[0]
        async with open_channel(cluster.router.address) as channel:
            prompts = await learn(cluster, channel)
            agent = psutil.Process(source.pid).children()
            assert agent
            await set_rules(decode, [{"at": "read", "do": "delay", "seconds": 0.6, "times": None}])

            async def until_stopped_and_posted() -> None:
                await until_reading(decode)
                for process in (*agent, psutil.Process(source.pid)):
                    process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(0.7)

            await leave(channel, prompts, until_stopped_and_posted())
            await until_quarantined(cluster, decode, step_s)
            await cluster.eventually(
                lambda: not any(decode.blocks()[o] for o in ("quarantined", "reserved")),
                8,
                "the blocks are reclaimed while the source is stopped",
            )
            assert teardowns(decode) >= 1
            source.kill()  # over TCP it may crash when it goes on: hence the switch
            for process in agent:
                process.kill()
            await asyncio.sleep(0.3)
            state = await report(decode)
            assert (state.num_canaries_changed, state.num_foreign_writes) == (0, 0)

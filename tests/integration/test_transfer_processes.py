"""Pulls from a source in another process, which is killed, stopped, restarted."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
import xxhash

from diptych.timers import Timers
from diptych.v1 import decode_pb2, worker_pb2
from kvtransfer.digest import descriptor_digest
from kvtransfer.endpoint import TransferEndpoint
from kvtransfer.reader.pull_machine import PullError, PullRequest
from kvtransfer.testing.faults import FaultRule, FaultScript
from kvtransfer.testing.transport import FaultSwitch
from tests.integration.source_process import LOCAL, SourceProcess, connect, source_process
from tests.integration.transfer_rig import (
    BLOCK_SIZE,
    BLOCKS,
    NUM_TOKENS,
    PATIENT,
    TIMERS,
    Reader,
    Source,
    agents,
    config,
    open_reader,
    open_source,
    until_idle,
)
from tests.transports import AGENTS, TRANSPORTS, needs_ucxx
from tests.waiting import until, within

SILENT = "the source is lost: silent"  # so it is said of one whose connection stands


async def failure_of(reader: Reader, source: SourceProcess) -> PullError:
    with pytest.raises(PullError) as excinfo:
        await reader.pairs.open_pull(source.request).run()
    return excinfo.value


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_bytes_move_between_processes(transport: str) -> None:
    async with source_process(transport) as source, open_reader(config(transport)) as reader:
        pair = await connect(reader, source)
        assert pair.transport == transport
        source.announce_rest()
        await reader.pairs.open_pull(source.request).run()
        assert xxhash.xxh3_128_hexdigest(reader.content(LOCAL)) == source.digest


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_killed_source_is_noticed_at_once_and_its_restart_heals(transport: str) -> None:
    async with open_reader(config(transport)) as reader:
        async with source_process(transport, incarnation="first") as source:
            await connect(reader, source)
            async with asyncio.TaskGroup() as tasks:
                failing = tasks.create_task(failure_of(reader, source))
                await asyncio.sleep(0.2)
                source.process.kill()
                error = await failing
            assert error.failure == decode_pb2.PULL_FAILURE_SOURCE_LOST
            assert SILENT not in error.message
            await reader.wait_for(source.key, worker_pb2.PAIR_STATE_FAILED)
            again = await failure_of(reader, source)
            assert again.failure == decode_pb2.PULL_FAILURE_NOT_CONNECTED
        async with source_process(
            transport, incarnation="second", address=source.key.address
        ) as restarted:
            assert restarted.key.address == source.key.address
            await until(lambda: "at this address is second" in reader.pairs.pairs()[0].message, 10)
            await connect(reader, restarted)
            restarted.announce_rest()
            await reader.pairs.open_pull(restarted.request).run()
            assert xxhash.xxh3_128_hexdigest(reader.content(LOCAL)) == restarted.digest
        assert not reader.quarantined


async def test_a_source_that_is_silent_instead_of_confirming_is_lost() -> None:
    """Nothing says that what landed is wrong: to bind again to the same source is no use."""
    timers = Timers(heartbeat_s=0.1, lost_peer_s=5, confirm_s=1.0)
    switch = FaultSwitch(FaultScript([FaultRule(at="confirm", do="drop")]))
    async with (
        source_process("inline") as source,
        open_reader(config("inline"), timers=timers, interceptor=switch) as reader,
    ):
        await connect(reader, source)
        source.announce_rest()
        async with asyncio.TaskGroup() as tasks:
            failing = tasks.create_task(failure_of(reader, source))
            await until(lambda: switch.script.num_fired == [1])
            source.signal(signal.SIGSTOP)
            error = await failing
        source.signal(signal.SIGCONT)
    assert error.failure == decode_pb2.PULL_FAILURE_SOURCE_LOST
    assert error.message.endswith("not confirmed within 1.0 s")


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_stopped_source_is_lost_and_heals_when_it_continues(transport: str) -> None:
    async with source_process(transport) as source, open_reader(config(transport)) as reader:
        await connect(reader, source)
        async with asyncio.TaskGroup() as tasks:
            failing = tasks.create_task(failure_of(reader, source))
            await asyncio.sleep(0.2)
            source.signal(signal.SIGSTOP)
            error = await failing
        assert error.failure == decode_pb2.PULL_FAILURE_SOURCE_LOST
        assert SILENT in error.message
        source.signal(signal.SIGCONT)
        await reader.wait_for(source.key, worker_pb2.PAIR_STATE_PROVEN)
        source.announce_rest()
        await reader.pairs.open_pull(source.request).run()


BIG = 2 * 2**20
TCP = {"ucx_tls": ("tcp", "cuda_copy"), "allow_nixl_tcp": True, "allow_faults": True}
OVER_TCP = [("nixl", TCP), pytest.param("ucxx", {}, marks=needs_ucxx)]


async def until_reading(reader: Reader) -> None:
    """A read was posted and has not ended."""
    async with within(5):
        while not reader.pairs.num_open_reads:
            await asyncio.sleep(0)


@pytest.mark.parametrize(("transport", "settings"), OVER_TCP)
async def test_an_unfinished_read_is_quarantined_and_teardown_reclaims_it(
    transport: str, settings: dict[str, object]
) -> None:
    """Over TCP a stopped source leaves reads unfinished for ever."""
    async with (
        source_process(transport, block_bytes=BIG, settings=json.dumps(settings)) as source,
        source_process(
            transport, block_bytes=BIG, settings=json.dumps(settings), incarnation="other"
        ) as other,
        open_reader(
            config(transport, quarantine_max_s=0.7, quarantine_max_ratio=1, **settings),
            block_bytes=BIG,
        ) as reader,
    ):
        reader.pairs.set_peers("another router", [other.key])
        await reader.wait_for(other.key, worker_pb2.PAIR_STATE_PROVEN)
        await connect(reader, source)
        pull = reader.pairs.open_pull(source.request)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(pull.run())
            await until_reading(reader)
            source.signal(signal.SIGSTOP)
            await asyncio.sleep(0.1)
            unfinished = pull.abandon()
            task.cancel()
        assert unfinished
        assert reader.quarantined == unfinished
        await asyncio.sleep(0.3)
        assert reader.quarantined == unfinished
        await until(lambda: not reader.quarantined)
        assert reader.pairs.counters.num_agent_teardowns == 1
        assert not reader.pairs.quarantined_block_ids
        assert reader.pairs.num_quarantined_blocks_ever == len(unfinished)
        before = reader.content(LOCAL)
        source.signal(signal.SIGCONT)  # over TCP it may crash now: hence the switch
        await asyncio.sleep(0.3)
        assert reader.content(LOCAL) == before  # nothing landed late
        await connect(reader, other)
        other.announce_rest()
        await reader.pairs.open_pull(other.request).run()
        assert xxhash.xxh3_128_hexdigest(reader.content(LOCAL)) == other.digest


@pytest.mark.parametrize(("transport", "settings"), OVER_TCP)
async def test_reads_of_a_pull_that_is_given_up_end_by_themselves(
    transport: str, settings: dict[str, object]
) -> None:
    """Over TCP none of their bytes comes without the source's agent, which is slow here."""
    async with (
        open_source(config(transport, **settings), block_bytes=BIG) as source,
        open_reader(config(transport, **settings), block_bytes=BIG) as reader,
    ):
        await reader.connect(source)
        (agent,) = agents(source.endpoint.transports[transport])
        assert agent.pid is not None
        source.fill(BLOCKS)
        ticket = source.lease("lease", BLOCKS, NUM_TOKENS, "reader")
        source.leases.announce("lease", NUM_TOKENS)
        pull = reader.pairs.open_pull(reader.request(source, ticket, NUM_TOKENS, LOCAL))
        os.kill(agent.pid, signal.SIGSTOP)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(pull.run())
            await until_reading(reader)
            await asyncio.sleep(0.1)  # it is posted as well
            assert pull.abandon()
            task.cancel()
        await until_idle(source)
        assert reader.quarantined
        os.kill(agent.pid, signal.SIGCONT)
        await until(lambda: not reader.quarantined)
        assert not reader.pairs.counters.num_agent_teardowns


@pytest.mark.parametrize(("transport", "settings"), OVER_TCP)
async def test_a_source_killed_while_it_is_read_loses_the_pull(
    transport: str, settings: dict[str, object]
) -> None:
    async with (
        source_process(transport, block_bytes=BIG, settings=json.dumps(settings)) as source,
        open_reader(config(transport, **settings), block_bytes=BIG) as reader,
    ):
        await connect(reader, source)
        pull = reader.pairs.open_pull(source.request)

        async def failure() -> PullError:
            with pytest.raises(PullError) as excinfo:
                await pull.run()
            return excinfo.value

        async with within(2), asyncio.TaskGroup() as tasks:
            failing = tasks.create_task(failure())
            await until_reading(reader)
            source.process.kill()
            error = await failing
        assert error.failure == decode_pb2.PULL_FAILURE_SOURCE_LOST
        assert SILENT not in error.message
        await until(lambda: not reader.quarantined)


def agent_pid(endpoint: TransferEndpoint) -> int:
    (transport,) = endpoint.transports.values()
    (agent,) = agents(transport)
    assert agent.pid is not None
    return agent.pid


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP])
@pytest.mark.parametrize("side", ["reader", "source"])
@pytest.mark.parametrize("transport", AGENTS)
async def test_a_dead_or_hanging_agent_is_replaced_and_the_worker_stays(
    transport: str, side: str, number: signal.Signals
) -> None:
    """Whether it crashes or hangs, the pair is proven anew; leases and tickets stand."""
    settings = config(transport, agent_answer_s=0.8)
    # A worker's own: the next agent's process starts beside whatever else the machine does.
    timers = TIMERS.model_copy(update={"read_progress_s": Timers().read_progress_s})
    async with open_source(settings) as source, open_reader(settings, timers=timers) as reader:
        await reader.connect(source)
        content = source.fill(LOCAL[:4])
        ticket = source.lease("lease", LOCAL[:4], 4 * BLOCK_SIZE, "reader")
        source.leases.announce("lease", 4 * BLOCK_SIZE)
        endpoint = reader.endpoint if side == "reader" else source.endpoint
        before = agent_pid(endpoint)
        request = reader.request(source, ticket, 4 * BLOCK_SIZE, LOCAL[4:8])
        async with within(5), asyncio.TaskGroup() as tasks:
            pulling = tasks.create_task(pull_until_replaced(reader, request, endpoint, before))
            if side == "reader":
                os.kill(before, signal.SIGSTOP)  # the read that it is in stays open
                await until_reading(reader)
            else:
                await asyncio.sleep(0.02)
            os.kill(before, number)
            if number != signal.SIGSTOP:
                os.kill(before, signal.SIGCONT)
            await pulling
        assert not psutil.pid_exists(before)
        assert reader.pairs.counters.num_refetches
        assert reader.content(LOCAL[4:8]) == content
        assert not reader.quarantined


async def pull_until_replaced(
    reader: Reader, request: PullRequest, endpoint: TransferEndpoint, before: int
) -> None:
    """Pull again and again, also once over the new agent; each must be proven."""
    while True:
        (transport,) = endpoint.transports.values()
        is_last = transport.ready and agent_pid(endpoint) != before
        await reader.pairs.open_pull(request).run()
        if is_last:
            return


@contextmanager
def sent_elsewhere(source: Source, elsewhere: int) -> Iterator[None]:
    """Whoever is to read the source over nixl is sent to this port."""
    (agent,) = agents(source.endpoint.transports["nixl"])
    assert agent.pid is not None
    assert agent._descriptor is not None
    (port,) = {
        connection.laddr.port
        for connection in psutil.Process(agent.pid).net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    said = agent._descriptor
    theirs, ours = (
        b"\x82" + number.to_bytes(2, "big")  # of two bytes, which end an address of UCX
        for number in (port, elsewhere)
    )
    assert said.agent_metadata.count(theirs) == 1
    said.agent_metadata = said.agent_metadata.replace(theirs, ours)
    said.digest = descriptor_digest(said)
    yield


@contextmanager
def silenced(source: Source) -> Iterator[None]:
    """It never answers."""
    with socket.socket() as silent, socket.socket() as only_one, socket.socket() as one_more:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        for each in (only_one, one_more):  # nobody accepts the first, so there is no room
            each.setblocking(False)
            each.connect_ex(silent.getsockname())
        with sent_elsewhere(source, silent.getsockname()[1]):
            yield


async def test_a_source_that_is_silent_over_nixl_takes_the_agent_from_the_others_only_once() -> (
    None
):
    """The call that connects it does not return. It is read inline, the others over nixl again."""
    both = ("nixl", "inline")
    async with (
        open_source(config("nixl", transports=both), incarnation="near") as near,
        open_source(config("nixl", transports=both), incarnation="far") as far,
        open_reader(config("nixl", transports=both, agent_answer_s=2.0), timers=PATIENT) as reader,
    ):
        await reader.connect(near)
        (agent,) = agents(reader.endpoint.transports["nixl"])
        content = near.fill(LOCAL[:4])
        ticket = near.lease("lease", LOCAL[:4], 4 * BLOCK_SIZE, "reader")
        near.leases.announce("lease", 4 * BLOCK_SIZE)
        request = reader.request(near, ticket, 4 * BLOCK_SIZE, LOCAL[4:8])
        with silenced(far):
            reader.pairs.set_peers("router", [near.key, far.key])
            await reader.pairs.open_pull(request).run()
            pair = await reader.wait_for(far.key, worker_pb2.PAIR_STATE_PROVEN)
            assert pair.transport == "inline"
            assert "ended as it connected the source" in pair.message
            await reader.pairs.open_pull(request).run()
            pair = await reader.wait_for(near.key, worker_pb2.PAIR_STATE_PROVEN)
            assert (pair.transport, pair.message) == ("nixl", "")
        assert reader.content(LOCAL[4:8]) == content
        assert agent._identity.epoch == 2


async def test_a_source_whose_connections_break_takes_the_agent_from_the_others_twice() -> None:
    """Each read of it that breaks ends our agent; it was tried twenty times, and every 30 s."""

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    both = config("nixl", transports=("nixl", "inline"))
    async with (
        open_source(both, incarnation="near") as near,
        open_source(both, incarnation="far") as far,
        open_reader(both, timers=PATIENT) as reader,
        await asyncio.start_server(hang_up, "127.0.0.1", 0) as server,
    ):
        await reader.connect(near)
        (agent,) = agents(reader.endpoint.transports["nixl"])
        with sent_elsewhere(far, server.sockets[0].getsockname()[1]):
            reader.pairs.set_peers("router", [near.key, far.key])
            async with within(30):
                while "inline" not in {pair.transport for pair in reader.pairs.pairs()}:
                    await asyncio.sleep(0.01)
        by_source = {pair.source_incarnation: pair for pair in reader.pairs.pairs()}
        assert by_source["far"].transport == "inline"
        assert "nixl lost the source" in by_source["far"].message
        assert agent._identity.epoch <= 3
        assert reader.pairs.counters.num_transport_fallbacks == 1
        await reader.wait_for(near.key, worker_pb2.PAIR_STATE_PROVEN)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("transport", AGENTS)
async def test_no_agent_outlives_its_worker(transport: str, number: signal.Signals) -> None:
    async with source_process(transport) as source:
        (agent,) = psutil.Process(source.process.pid).children()
        agent.suspend()  # even one that hangs
        source.process.send_signal(number)
        await asyncio.to_thread(source.process.wait)
        await until(lambda: not agent.is_running() or agent.status() == psutil.STATUS_ZOMBIE, 2)


@pytest.mark.parametrize("transport", AGENTS)
async def test_an_agent_listens_on_the_devices_named_for_it_alone(transport: str) -> None:
    async with source_process(transport) as source, open_reader(config(transport)) as reader:
        await connect(reader, source)
        (agent,) = psutil.Process(source.process.pid).children()
        for pid in (agent.pid, agent_pid(reader.endpoint)):
            listening = [
                connection.laddr.ip
                for connection in psutil.Process(pid).net_connections()
                if connection.status == psutil.CONN_LISTEN
            ]
            assert set(listening) == {"127.0.0.1"}


@pytest.mark.parametrize("transport", AGENTS)
async def test_a_sources_agent_can_write_nothing_and_no_agent_knows_a_secret(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    settings = config(transport)
    async with open_source(settings) as source, open_reader(settings) as reader:
        await reader.connect(source)
        for endpoint, permissions in ((source.endpoint, "r--s"), (reader.endpoint, "rw-s")):
            agent = psutil.Process(agent_pid(endpoint))
            assert "HF_TOKEN" not in agent.environ()
            pools = [each for each in agent.memory_maps(grouped=False) if "memfd" in each.path]
            assert [pool.perms for pool in pools] == [permissions]

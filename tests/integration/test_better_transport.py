"""A pair that fell back is proven over the wanted transport later, beside its pulls."""

import asyncio
import logging
import os
import signal
from functools import partial

import psutil
import pytest

from diptych.v1 import decode_pb2, kv_source_pb2, worker_pb2
from kvtransfer.agents.base import AgentSettings
from kvtransfer.reader.proof import LinkProver
from kvtransfer.reader.proven_link import ProvenLink
from kvtransfer.reader.pull_machine import PullError
from kvtransfer.transports.agent_identity import AgentIdentity
from tests.integration.transfer_rig import (
    BLOCK_SIZE,
    Reader,
    Source,
    agents,
    config,
    open_reader,
    open_source,
)
from tests.transports import AGENTS
from tests.waiting import until, within

BLOCKS, LOCAL, OTHERS = range(4), range(10, 14), range(20, 24)
NUM_TOKENS = 4 * BLOCK_SIZE
AWAY_S = 1.0


async def take_agent_away(source: Source, name: str) -> None:
    """For ``AWAY_S``, a pause that an agent gets whose predecessor died young as well."""
    (transport,) = agents(source.endpoint.transports[name])
    first = transport.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: transport.pid not in (None, first))
    assert transport.pid is not None
    os.kill(transport.pid, signal.SIGKILL)


def has_confirmed(source: Source, num_fetches: int) -> bool:
    return source.servicer.counters.num_confirmed >= num_fetches


async def until_over(reader: Reader, transport: str) -> None:
    """Watch the one pair; it may at no time be anything but proven."""
    async with within(5):
        while True:
            (pair,) = reader.pairs.pairs()
            assert pair.state == worker_pb2.PAIR_STATE_PROVEN, pair
            if pair.transport == transport:
                return
            await asyncio.sleep(0)


@pytest.mark.parametrize("name", AGENTS)
async def test_a_source_whose_agent_comes_back(name: str, caplog: pytest.LogCaptureFixture) -> None:
    both = (name, "inline")
    of_source = config(name, transports=both, reconnect_min_s=AWAY_S, reconnect_max_s=AWAY_S)
    async with (
        open_source(of_source) as source,
        open_reader(config(name, transports=both, reprove_s=0.2)) as reader,
    ):
        await take_agent_away(source, name)
        assert (await reader.connect(source)).transport == "inline"
        content = source.fill(BLOCKS)
        ticket = source.lease("lease", BLOCKS, NUM_TOKENS, "reader")
        source.leases.announce("lease", BLOCK_SIZE)
        caplog.set_level(logging.INFO, logger="kvtransfer")
        caplog.clear()
        async with asyncio.TaskGroup() as tasks:
            request = reader.request(source, ticket, NUM_TOKENS, LOCAL)
            pulling = tasks.create_task(reader.pairs.open_pull(request).run())
            await until(lambda: reader.content(LOCAL[:1]) == content[:4096])
            await until_over(reader, name)
            assert not pulling.done()
            source.leases.announce("lease", NUM_TOKENS)
        assert pulling.result().stats.transport == "inline"
        assert reader.content(LOCAL) == content

        ticket = source.lease("next", BLOCKS, NUM_TOKENS, "reader")
        source.leases.announce("next", NUM_TOKENS)
        result = await reader.pairs.open_pull(
            reader.request(source, ticket, NUM_TOKENS, OTHERS)
        ).run()
        assert result.stats.transport == name
        assert reader.content(OTHERS) == content
        (line,) = [r for r in caplog.records if r.name == "kvtransfer.reader.pair"]
        assert line.getMessage() == "better transport proven"
        assert not reader.pairs.counters.num_pairs_failed
        assert not reader.pairs.counters.num_refetches


async def test_attempts_that_fail_are_not_noticed(caplog: pytest.LogCaptureFixture) -> None:
    """A source that nixl reaches over TCP alone."""
    both = ("nixl", "inline")
    tcp = config("nixl", transports=both, ucx_tls=("tcp", "cuda_copy"), reprove_s=0.05)
    async with open_source(config("nixl", transports=both)) as source, open_reader(tcp) as reader:
        before = await reader.connect(source)
        assert before.transport == "inline"
        assert "nixl would read over TCP" in before.message
        served = source.servicer.counters
        num_confirmed = served.num_confirmed
        caplog.set_level(logging.DEBUG, logger="kvtransfer.reader.pair")
        caplog.clear()
        source.fill(BLOCKS)
        for number in range(3):
            num_probes = 2 * (number + 1)
            await until(partial(has_confirmed, source, num_confirmed + num_probes))
            ticket = source.lease(str(number), BLOCKS, NUM_TOKENS, "reader")
            source.leases.announce(str(number), NUM_TOKENS)
            await reader.pairs.open_pull(reader.request(source, ticket, NUM_TOKENS, LOCAL)).run()
            assert reader.content(LOCAL) == source.content(BLOCKS)
        (after,) = reader.pairs.pairs()
        assert (after.state, after.transport, after.message) == (
            before.state,
            before.transport,
            before.message,
        )
        assert reader.pairs.counters.num_transport_fallbacks == 1
        assert not served.num_refused
        lines = [r for r in caplog.records if r.name == "kvtransfer.reader.pair"]
        assert {line.levelno for line in lines} == {logging.DEBUG}
        await until(lambda: not reader.scratch.num_lent)


async def test_attempts_in_vain_cost_the_agents_one_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """UCX keeps each for as long as both agents live: after a day they had no file left."""
    tcp = config(
        "nixl", transports=("nixl", "inline"), ucx_tls=("tcp", "cuda_copy"), reprove_s=0.01
    )
    num_tried = 0
    prove = LinkProver.prove

    async def counted(self: LinkProver, response: kv_source_pb2.ConnectResponse) -> ProvenLink:
        nonlocal num_tried
        num_tried += response.transport == "nixl"
        return await prove(self, response)

    monkeypatch.setattr(LinkProver, "prove", counted)
    async with open_source(tcp) as source, open_reader(tcp) as reader:
        assert (await reader.connect(source)).transport == "inline"
        both = [
            psutil.Process(agents(end.endpoint.transports["nixl"])[0].pid)
            for end in (source, reader)
        ]
        await until(lambda: num_tried >= 5)
        before = [agent.num_fds() for agent in both]
        await until(lambda: num_tried >= 15)
        assert [agent.num_fds() for agent in both] == before


async def test_a_passing_fault_of_the_only_common_transport(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The source has nothing to fall back to: the pair waits for nixl."""
    prove = LinkProver.prove
    num_tried = 0

    async def fails_at_first(
        self: LinkProver, response: kv_source_pb2.ConnectResponse
    ) -> ProvenLink:
        nonlocal num_tried
        num_tried += 1
        if num_tried <= 4:
            raise PullError(decode_pb2.PULL_FAILURE_TRANSPORT, "out of order")
        return await prove(self, response)

    monkeypatch.setattr(LinkProver, "prove", fails_at_first)
    both = config("nixl", transports=("nixl", "inline"))
    async with open_source(config("nixl")) as source, open_reader(both) as reader:
        reader.pairs.set_peers("router", [source.key])
        failed = await reader.wait_for(source.key, worker_pb2.PAIR_STATE_FAILED)
        assert failed.message == "nixl: out of order"
        assert (await reader.connect(source)).transport == "nixl"


async def test_an_agent_that_could_not_start_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    next_life = AgentIdentity.next_life
    broken: set[str] = {"source"}

    def with_or_without_device(self: AgentIdentity) -> AgentSettings:
        settings = next_life(self)
        if any(settings.name.startswith(incarnation) for incarnation in broken):
            return settings._replace(ucx_net_devices="nosuchdevice0")
        return settings

    monkeypatch.setattr(AgentIdentity, "next_life", with_or_without_device)
    both = config("nixl", transports=("nixl", "inline"), reprove_s=0.2)
    async with open_source(both) as source, open_reader(both) as reader:
        assert (await reader.connect(source)).transport == "inline"
        broken.clear()
        await until_over(reader, "nixl")

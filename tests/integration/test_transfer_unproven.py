"""Pulls that are not proven, over real transports: not a byte of them is used."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from diptych.v1 import decode_pb2, worker_pb2
from kvtransfer.config import TransferConfig
from kvtransfer.memory import HostMemory
from kvtransfer.reader.pull_machine import PullError
from kvtransfer.testing.faults import FaultRule, FaultScript
from kvtransfer.testing.transport import FaultSwitch
from tests.integration.transfer_rig import (
    BLOCK_SIZE,
    BLOCKS,
    LOCAL,
    NUM_TOKENS,
    PATIENT,
    Reader,
    Source,
    config,
    failure_of,
    open_reader,
    open_source,
    until_digested,
)
from tests.transports import AGENTS


async def test_bad_tickets_are_refused(source: Source, reader: Reader) -> None:
    await reader.connect(source)
    ticket = source.lease("lease", BLOCKS, NUM_TOKENS, "another reader")
    for bad in (ticket, os.urandom(16), b""):
        error = await failure_of(reader, source, bad)
        assert error.failure == decode_pb2.PULL_FAILURE_TICKET_INVALID
    mine = source.lease("mine", BLOCKS, NUM_TOKENS, "reader")
    error = await failure_of(reader, source, mine, num_tokens=NUM_TOKENS - 1)
    assert error.failure == decode_pb2.PULL_FAILURE_UNPROVEN
    pair = reader.pairs.pairs()[0]
    assert pair.state == worker_pb2.PAIR_STATE_PROVEN


async def test_a_lease_of_another_prompt_of_equal_length_is_unproven(
    source: Source, reader: Reader
) -> None:
    """Two open leases for this reader, their tickets swapped: not a byte is read."""
    await reader.connect(source)
    others = [block_id + 30 for block_id in BLOCKS]
    source.fill([*BLOCKS, *others])
    mine = source.lease("mine", BLOCKS, NUM_TOKENS, "reader", prompt_digest=b"m" * 16)
    swapped = source.lease("other", others, NUM_TOKENS, "reader", prompt_digest=b"o" * 16)
    for lease in ("mine", "other"):
        source.leases.announce(lease, NUM_TOKENS)
    ask = partial(reader.request, source, prompt_digest=b"m" * 16)
    with pytest.raises(PullError, match="another sequence's") as excinfo:
        await reader.pairs.open_pull(ask(swapped, NUM_TOKENS, LOCAL)).run()
    assert excinfo.value.failure == decode_pb2.PULL_FAILURE_UNPROVEN
    assert not any(reader.content(LOCAL))
    await reader.pairs.open_pull(ask(mine, NUM_TOKENS, LOCAL)).run()
    assert reader.content(LOCAL) == source.content(BLOCKS)


async def test_bytes_that_changed_after_their_digest_are_unproven(
    source: Source, reader: Reader
) -> None:
    await reader.connect(source)
    source.fill(BLOCKS)
    ticket = source.lease("lease", BLOCKS, NUM_TOKENS, "reader")
    source.leases.announce("lease", NUM_TOKENS)
    await until_digested(source)
    before = source.content(BLOCKS[2:3])[7]
    source.memory.write(BLOCKS[2:3], 7, bytes([before ^ 1]))
    error = await failure_of(reader, source, ticket)
    assert error.failure == decode_pb2.PULL_FAILURE_UNPROVEN


async def test_a_stale_block_is_unproven_at_level_sampled(transport: str) -> None:
    transfer = config(transport, digest_level="sampled")
    async with open_source(transfer) as source, open_reader(transfer) as reader:
        await reader.connect(source)
        source.fill(BLOCKS)
        ticket = source.lease("lease", BLOCKS, NUM_TOKENS, "reader")
        source.leases.announce("lease", NUM_TOKENS)
        await until_digested(source)
        source.fill(BLOCKS[2:3])
        error = await failure_of(reader, source, ticket)
        assert error.failure == decode_pb2.PULL_FAILURE_UNPROVEN


async def test_a_block_reused_under_the_lease_is_unproven(source: Source, reader: Reader) -> None:
    await reader.connect(source)
    source.fill(BLOCKS)
    ticket = source.lease("lease", BLOCKS, NUM_TOKENS, "reader")
    source.leases.announce("lease", NUM_TOKENS)
    source.generations[BLOCKS[4]] = 1
    error = await failure_of(reader, source, ticket)
    assert error.failure == decode_pb2.PULL_FAILURE_UNPROVEN
    assert error.refusal == "KV_UNPROVEN"


@pytest.mark.parametrize("name", AGENTS)
async def test_a_block_that_the_source_does_not_have_is_not_read(name: str) -> None:
    """The library is not asked: what it does with such a block is its own affair."""
    wrong_block = FaultRule(at="range", do="corrupt", field="block_ids")
    switch = FaultSwitch(FaultScript([wrong_block]))
    async with (
        open_source(config(name)) as source,
        open_reader(config(name), interceptor=switch) as reader,
    ):
        await reader.connect(source)
        source.fill(BLOCKS[:1])
        ticket = source.lease("lease", BLOCKS[:1], BLOCK_SIZE, "reader")
        source.leases.announce("lease", BLOCK_SIZE)
        error = await failure_of(reader, source, ticket, num_tokens=BLOCK_SIZE)
        assert error.failure == decode_pb2.PULL_FAILURE_UNPROVEN
        assert "has 64 blocks" in error.message
        await reader.pairs.open_pull(reader.request(source, ticket, BLOCK_SIZE, LOCAL)).run()
        assert reader.content(LOCAL[:1]) == source.content(BLOCKS[:1])


@asynccontextmanager
async def leased(
    transfer: TransferConfig, switch: FaultSwitch
) -> AsyncIterator[tuple[Source, Reader, bytes]]:
    """A source with a lease that a reader behind ``switch`` may pull; nothing is announced."""
    async with (
        open_source(transfer) as source,
        # A second pull waits for the first one's reads; how long the machine takes is no matter.
        open_reader(transfer, interceptor=switch, timers=PATIENT) as reader,
    ):
        await reader.connect(source)
        source.fill(BLOCKS)
        yield source, reader, source.lease("lease", BLOCKS, NUM_TOKENS, "reader")


FEWER_BLOCKS = FaultRule(at="range", do="truncate", field="block_ids")


@pytest.mark.parametrize("digest_level", ["sampled", "off"])
@pytest.mark.parametrize(
    "rule",
    [
        FaultRule(at="opened", do="corrupt"),
        FaultRule(at="range", do="drop"),
        FaultRule(at="range", do="duplicate"),
        FaultRule(at="range", do="reorder"),
        FEWER_BLOCKS,
        FaultRule(at="confirmed", do="drop"),
    ],
    ids=lambda rule: f"{rule.at} {rule.do}",
)
async def test_order_and_coverage_are_proven_with_fewer_digests_too(
    digest_level: str, rule: FaultRule
) -> None:
    await check_unproven("inline", digest_level, rule)


@pytest.mark.parametrize("digest_level", ["sampled", "off"])
@pytest.mark.parametrize("transport", AGENTS)
async def test_coverage_is_where_agents_read(transport: str, digest_level: str) -> None:
    await check_unproven(transport, digest_level, FEWER_BLOCKS)


async def check_unproven(transport: str, digest_level: str, rule: FaultRule) -> None:
    """The pull that meets the rule is; the next one moves everything."""
    transfer = config(transport, digest_level=digest_level)
    switch = FaultSwitch(FaultScript([rule]))
    async with leased(transfer, switch) as (source, reader, ticket):
        for num_tokens in (2 * BLOCK_SIZE, NUM_TOKENS):
            source.leases.announce("lease", num_tokens)
        error = await failure_of(reader, source, ticket)
        assert switch.script.num_fired == [1]
        assert error.failure == decode_pb2.PULL_FAILURE_UNPROVEN
        await reader.pairs.open_pull(reader.request(source, ticket, NUM_TOKENS, LOCAL)).run()
        assert reader.content(LOCAL) == source.content(BLOCKS)


@pytest.mark.parametrize("digest_level", ["sampled", "off"])
@pytest.mark.parametrize("transport", AGENTS)
async def test_what_never_landed_is_found_by_a_sample_and_by_nothing_less(
    transport: str, digest_level: str
) -> None:
    transfer = config(transport, digest_level=digest_level)
    switch = FaultSwitch(FaultScript([FaultRule(at="read", do="drop")]))
    async with leased(transfer, switch) as (source, reader, ticket):
        source.leases.announce("lease", NUM_TOKENS)
        assert isinstance(reader.memory, HostMemory)
        switch.memory = reader.memory
        if digest_level == "sampled":
            error = await failure_of(reader, source, ticket)
            assert error.failure == decode_pb2.PULL_FAILURE_UNPROVEN
        else:  # what docs/faults.md says of it
            await reader.pairs.open_pull(reader.request(source, ticket, NUM_TOKENS, LOCAL)).run()
            assert reader.content(LOCAL) != source.content(BLOCKS)


async def test_inline_is_checked_byte_for_byte_where_no_digests_are_asked_for() -> None:
    transfer = config("inline", digest_level="off")
    switch = FaultSwitch(FaultScript([FaultRule(at="data", do="corrupt")]))
    async with leased(transfer, switch) as (source, reader, ticket):
        source.leases.announce("lease", NUM_TOKENS)
        error = await failure_of(reader, source, ticket)
        assert error.failure == decode_pb2.PULL_FAILURE_UNPROVEN
        await reader.pairs.open_pull(reader.request(source, ticket, NUM_TOKENS, LOCAL)).run()
        assert reader.content(LOCAL) == source.content(BLOCKS)

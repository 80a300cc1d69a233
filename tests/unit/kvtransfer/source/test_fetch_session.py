"""One Fetch at its source, over a stand-in for gRPC: who is silent or unread ends it."""

import asyncio
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from diptych.errors import InvalidRequestError, TransferInterruptedError
from diptych.rpc.server import Context
from diptych.timers import Timers
from diptych.v1 import common_pb2
from diptych.v1.kv_source_pb2 import Confirm, FetchCommand, FetchEvent, FetchOpen
from diptych.worker.scratch import PoolScratch
from kvtransfer.digest import block_digest
from kvtransfer.memory import HostMemory
from kvtransfer.source.fetch_session import FetchSession, SourceCounters, SourceDeps
from kvtransfer.source.lease_table import LeaseTable
from kvtransfer.source.probe_blocks import ProbeBlocks

TICKET = b"t" * 16
TIMERS = Timers(heartbeat_s=0.01, lost_peer_s=0.05)
OPEN = FetchOpen(reader_incarnation="reader", source_incarnation="source", transport="nixl")


class Reader:
    """The reader's end: says what it is given, then nothing; reads nothing where it is stuck."""

    def __init__(self, *commands: FetchCommand, is_stuck: bool = False) -> None:
        self._commands = list(commands)
        self._is_stuck = is_stuck
        self.heard: list[FetchEvent] = []

    async def read(self) -> FetchCommand:
        if not self._commands:
            await asyncio.Event().wait()
        return self._commands.pop(0)

    async def write(self, event: FetchEvent) -> None:
        if self._is_stuck:
            await asyncio.Event().wait()
        self.heard.append(event)


class LeavingReader(Reader):
    """Half-closes while it is written to, and takes the event once it may."""

    def __init__(self, *commands: FetchCommand) -> None:
        super().__init__(*commands)
        self.is_written_to, self.takes = asyncio.Event(), asyncio.Event()

    async def read(self) -> FetchCommand:
        if self._commands:
            return self._commands.pop(0)
        await self.is_written_to.wait()
        return cast(FetchCommand, None)  # gRPC's word for the end is none either

    async def write(self, event: FetchEvent) -> None:
        self.is_written_to.set()
        await self.takes.wait()
        self.heard.append(event)


def session(reader: Reader, **endpoint_has: object) -> FetchSession:
    leases = LeaseTable(16, lambda block_id: 0)
    leases.open("lease", [1, 2], 32, b"")
    leases.grant("lease", TICKET, "reader")
    parts = {"thread": SimpleNamespace(stuck_s=0.0), **endpoint_has}
    endpoint = SimpleNamespace(incarnation="source", transports={"nixl": None}, **parts)
    deps = SourceDeps(
        cast(Any, endpoint),
        leases,
        ProbeBlocks(PoolScratch([])),
        TIMERS,
        SourceCounters(),
        common_pb2.EngineProgress,
    )
    return FetchSession(deps, cast(Context, reader))


def opened() -> FetchCommand:
    command = FetchCommand(open=OPEN)
    command.open.ticket = TICKET
    return command


@pytest.mark.parametrize("is_stuck", [False, True], ids=["silent", "does not read"])
async def test_a_reader_that_is_gone_is_lost_from_the_first_message_on(is_stuck: bool) -> None:
    reader = Reader(opened(), is_stuck=is_stuck)
    async with asyncio.timeout(5):
        with pytest.raises(TransferInterruptedError, match="the reader is lost"):
            await session(reader).run()
    assert bool(reader.heard) is not is_stuck


async def test_what_is_out_of_order_is_refused() -> None:
    for commands in (
        [FetchCommand(confirm=Confirm())],
        [opened(), opened()],
        [FetchCommand()],
    ):
        async with asyncio.timeout(5):
            with pytest.raises(InvalidRequestError):
                await session(Reader(*commands)).run()


@pytest.mark.parametrize("is_stuck", [False, True])
async def test_an_event_that_is_on_its_way_leaves_before_the_status(is_stuck: bool) -> None:
    """A reader that has half-closed waits for that."""
    reader = LeavingReader(opened())
    fetch = session(reader)
    async with asyncio.timeout(5):
        await fetch.run()
        assert not reader.heard
        if not is_stuck:
            reader.takes.set()
        assert await fetch.let_out() is not is_stuck
    assert len(reader.heard) == (not is_stuck)


class Thread:
    """Does what it is given at once."""

    stuck_s = 0.0

    async def call(self, job: Callable[[], Any]) -> Any:
        return job()

    def submit(self, job: Callable[[], Any], done: Callable[[Any, Exception | None], None]) -> None:
        done(job(), None)


async def test_each_probe_reads_bytes_that_were_never_there_before() -> None:
    """Else one whose bytes do not come would find those of the one before, and pass."""
    memory, seen = HostMemory(bytearray(4 * 64), 64), set[bytes]()
    layout = SimpleNamespace(block_size=16)
    scratch = PoolScratch([1, 3])
    looked: list[int] = []  # ranges that its reader knew of when it was looked for

    async def announced() -> None:
        probe = FetchCommand(open=OPEN)
        probe.open.num_probe_blocks = 2
        reader = Reader(probe)
        fetch = session(
            reader,
            memory=memory,
            layout=layout,
            thread=Thread(),
            expect_reads=lambda: looked.append(sum(e.HasField("range") for e in reader.heard)),
        )
        fetch._deps = replace(fetch._deps, probe_blocks=ProbeBlocks(scratch))
        with pytest.raises(TransferInterruptedError):  # it says nothing more
            await fetch.run()
        (told,) = [event.range for event in reader.heard if event.HasField("range")]
        assert looked.pop() == 0, "its reader reads as soon as it hears of them"
        blocks = [bytes(memory.block(block_id)) for block_id in told.block_ids]
        assert list(told.digests) == [block_digest(block) for block in blocks]
        assert seen.isdisjoint(blocks)
        seen.update(blocks)

    async with asyncio.timeout(5):
        for num_probes in (1, 2):
            await announced()
            assert len(seen) == 2 * num_probes
    assert scratch.num_lent == 0
    assert not any(memory.block(0)), "a sequence's"
    assert not any(memory.block(2))


@pytest.mark.usefixtures("no_collector")
async def test_one_that_is_over_keeps_no_call_alive() -> None:
    """gRPC's memory of a call is larger than Python's collector can see: it is freed at once."""

    async def serve() -> weakref.ref[Reader]:
        reader = Reader(opened())
        served = session(reader)
        try:
            await served.run()
        except TransferInterruptedError as error:
            error.__traceback__ = error.__context__ = None  # the test's own reference
        return weakref.ref(reader)

    async with asyncio.timeout(5):
        call = await serve()
    await asyncio.sleep(0)
    assert call() is None

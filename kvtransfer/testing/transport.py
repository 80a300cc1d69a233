"""A transport with faults: any other one, where a script's rules break messages and reads.

A pull that runs under a script gets its link from ``FaultSwitch.link``: the stream and the
peer behave like those they wrap, except where a rule fires. A source's side of a stream is
wrapped by ``FaultSwitch.context``.
"""

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, cast

from diptych.errors import DiptychError
from diptych.rpc.server import Context
from diptych.v1.kv_source_pb2 import FetchCommand, FetchEvent
from kvtransfer.errors import TransportError
from kvtransfer.memory import HostMemory
from kvtransfer.reader.proven_link import Link
from kvtransfer.source.lease_table import LeaseTable
from kvtransfer.testing import effects as damage
from kvtransfer.testing.faults import Fault, FaultScript, Point, PullFaults
from kvtransfer.transports.base import Copy, Peer

_POINTS: dict[str, Point] = {
    "open": "open",
    "confirm": "confirm",
    "opened": "opened",
    "range": "range",
    "data": "data",
    "confirmed": "confirmed",
}


class FaultSwitch:
    """What intercepts the transfers of a worker that allows faults, and the reads it spoils.

    Event loop, apart from what FaultyCopy does to it on the transfer thread.
    """

    def __init__(self, script: FaultScript) -> None:
        self.script = script
        self.memory: HostMemory | None = None  # once the pool exists
        self.generation_of: Callable[[int], int] = lambda block_id: 0
        self.num_foreign_writes = 0
        self.unfinished: set[FaultyCopy] = set()
        self.used_tickets: deque[bytes] = deque(maxlen=64)  # of proven pulls, oldest first
        self._swap: tuple[bytes, asyncio.Future[bytes]] | None = None  # waits for another pull

    def link(self, link: Link, num_tokens: int) -> Link:
        """``link`` as one pull of a sequence of so many tokens meets it."""
        faults = self.script.of_pull(num_tokens)
        stub = cast("Any", FaultyStub(self, faults, link.stub))
        peer = FaultyPeer(self, faults, link.transport, link.peer)
        return Link(stub, link.transport, peer, link.close, link.way)

    def context(self, context: Context, leases: LeaseTable) -> Context:
        """A source's end of one Fetch."""
        return cast("Context", FaultyContext(self, context, leases))

    async def swapped(self, ticket: bytes) -> bytes:
        """The ticket of the next pull that comes here; it gets this one."""
        waiting, self._swap = self._swap, None
        if waiting is None or waiting[1].done():
            self._swap = (ticket, asyncio.get_running_loop().create_future())
            return await self._swap[1]
        waiting[1].set_result(ticket)
        return waiting[0]

    def tear_down(self, transport: str) -> None:
        """Its agent is gone: reads over it that hang end with an error."""
        for copy in list(self.unfinished):
            copy.is_torn_down |= copy.transport == transport


class FaultyStub:
    """KVSource as a pull uses it."""

    def __init__(self, switch: FaultSwitch, faults: PullFaults, stub: Any) -> None:
        self._switch = switch
        self._faults = faults
        self._stub = stub

    def Fetch(self, request_iterator: None) -> "FaultyCall":
        return FaultyCall(self._switch, self._faults, self._stub.Fetch(request_iterator))


class FaultyCall:
    """The reader's end of one Fetch: faults on what it sends and on what it gets."""

    def __init__(self, switch: FaultSwitch, faults: PullFaults, call: Any) -> None:
        self._switch = switch
        self._faults = faults
        self._call = call
        self._arrived: deque[FetchEvent] = deque()
        self._held_back: FetchEvent | None = None
        self._unsent: FetchCommand | None = None
        self._ticket = b""

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._call.add_done_callback(callback)

    def cancel(self) -> bool:
        return bool(self._call.cancel())

    async def done_writing(self) -> None:
        await self._call.done_writing()

    async def write(self, command: FetchCommand) -> None:
        kind = command.WhichOneof("command") or ""
        fault = self._faults.at(_POINTS[kind]) if kind in _POINTS else None
        if kind == "open":
            self._ticket = command.open.ticket
            if fault is not None and fault.do == "replay" and self._switch.used_tickets:
                command.open.ticket = self._switch.used_tickets[0]
            if fault is not None and fault.do == "swap":
                command.open.ticket = await self._switch.swapped(self._ticket)
        if fault is not None and fault.do == "reorder":
            self._unsent = command
            return
        if fault is not None and fault.do == "drop":
            return
        await self._deliver(command, fault)
        unsent, self._unsent = self._unsent, None
        if unsent is not None:
            await self._call.write(unsent)

    async def read(self) -> Any:
        """The next event; another object at the end of the stream, as in gRPC."""
        while True:
            if self._arrived:
                return self._arrived.popleft()
            event = await self._call.read()
            if not isinstance(event, FetchEvent):
                return event
            await self._receive(event)

    async def _receive(self, event: FetchEvent) -> None:
        kind = event.WhichOneof("event") or ""
        if kind == "confirmed":
            self._switch.used_tickets.append(self._ticket)
        fault = self._faults.at(_POINTS[kind]) if kind in _POINTS else None
        if fault is not None and fault.do == "drop":
            return
        if fault is not None and fault.do == "reorder":
            self._held_back = event
            return
        if fault is not None:
            await _changed(event, kind, fault, self._switch.script)
        num_copies = 2 if fault is not None and fault.do == "duplicate" else 1
        self._arrived.extend([event] * num_copies)
        if self._held_back is not None:
            self._arrived.append(self._held_back)
            self._held_back = None

    async def _deliver(self, command: FetchCommand, fault: Fault | None) -> None:
        if fault is not None:
            kind = command.WhichOneof("command") or ""
            await _changed(command, kind, fault, self._switch.script)
        await self._call.write(command)
        if fault is not None and fault.do == "duplicate":
            await self._call.write(command)


class FaultyContext:
    """The source's end of one Fetch: takes tickets away from their readers."""

    def __init__(self, switch: FaultSwitch, context: Any, leases: LeaseTable) -> None:
        self._switch = switch
        self._context = context
        self._leases = leases
        self._revoke: Callable[[], None] = lambda: None
        self._faults: PullFaults | None = None

    async def read(self) -> Any:
        command = await self._context.read()
        if isinstance(command, FetchCommand) and command.HasField("open"):
            opened = command.open
            with contextlib.suppress(DiptychError):  # the session says so itself
                grant = self._leases.admit(
                    opened.ticket, opened.reader_incarnation, opened.first_token
                )
                lease_id = grant.lease.lease_id
                self._revoke = lambda: self._leases.grant(
                    lease_id, os.urandom(len(grant.ticket)), grant.reader_incarnation
                )
                self._faults = self._switch.script.of_pull(grant.lease.num_tokens)
            self._fire("open")
        return command

    def write(self, event: FetchEvent) -> Awaitable[None]:
        if event.HasField("range"):
            self._fire("range")
        written: Awaitable[None] = self._context.write(event)
        return written

    def _fire(self, point: Point) -> None:
        fault = self._faults.at(point) if self._faults is not None else None
        if fault is not None and fault.do == "revoke":
            self._revoke()


class FaultyPeer:
    """A source's memory; some reads of it go wrong."""

    def __init__(self, switch: FaultSwitch, faults: PullFaults, transport: str, peer: Peer) -> None:
        self._switch = switch
        self._faults = faults
        self._transport = transport
        self._peer = peer

    @property
    def usable(self) -> bool:
        return self._peer.usable

    def read(
        self,
        source_block_ids: tuple[int, ...],
        local_block_ids: tuple[int, ...],
        num_bytes: int | None = None,
    ) -> Copy | None:
        again = partial(self._peer.read, source_block_ids, local_block_ids, num_bytes)
        copy = again()
        if copy is None:  # its bytes come as Data
            return None
        return self._wrapped(copy, local_block_ids, num_bytes, again)

    def write(
        self,
        local_block_ids: tuple[int, ...],
        offset: int,
        payload: bytes,
        num_bytes: int | None = None,
    ) -> Copy:
        again = partial(self._peer.write, local_block_ids, offset, payload, num_bytes)
        return self._wrapped(again(), local_block_ids, num_bytes, again)

    def check_lane(self) -> None:
        self._peer.check_lane()

    def close(self) -> None:
        self._peer.close()

    def _wrapped(
        self,
        copy: Copy,
        local_block_ids: tuple[int, ...],
        num_bytes: int | None,
        again: Callable[[], Copy | None],
    ) -> Copy:
        fault = self._faults.at("read")
        if fault is None:
            return copy
        twice = again() if fault.do == "duplicate" else None
        return FaultyCopy(
            self._switch, fault, self._transport, copy, local_block_ids, num_bytes, twice
        )


class FaultyCopy:
    """One movement of bytes with a fault. Transfer thread only, once made."""

    wakes = False

    def __init__(
        self,
        switch: FaultSwitch,
        fault: Fault,
        transport: str,
        copy: Copy,
        local_block_ids: tuple[int, ...],
        num_bytes: int | None,
        twice: Copy | None,
    ) -> None:
        """num_bytes: of each block that it writes; nothing else of them is damaged."""
        assert switch.memory is not None
        self.transport = transport
        self.is_torn_down = False
        self._switch = switch
        self._fault = fault
        self._copies = [copy] if twice is None else [copy, twice]
        self._blocks = [switch.memory.block(block_id)[:num_bytes] for block_id in local_block_ids]
        self._generations = [(b, switch.generation_of(b)) for b in local_block_ids]
        self._posted: Copy | None = None
        self._due_s = 0.0  # of a delayed post, or of a lingering end

    def post(self) -> bool:
        self._switch.unfinished.add(self)
        if self._fault.do in ("delay", "linger"):
            self._due_s = time.monotonic() + self._fault.seconds
        return self.poll()

    def poll(self) -> bool:
        try:
            done = self._advance()
        except BaseException:
            self._switch.unfinished.discard(self)
            raise
        if done:
            self._switch.unfinished.discard(self)
        return done

    def _advance(self) -> bool:
        if self.is_torn_down:
            raise TransportError("the transport agent was torn down")
        match self._fault.do:
            case "hang":
                return False
            case "fail":
                raise TransportError("the script said so")
            case "drop":
                self._write_as_own(lambda: damage.poison(self._blocks, self._switch.script.random))
                return True
            case "delay" if time.monotonic() < self._due_s:
                return False
        if not self._land():
            return False
        return self._fault.do != "linger" or time.monotonic() >= self._due_s

    def _land(self) -> bool:
        """Move the bytes, if they were not yet; True once they lie there."""
        while self._copies:
            if self._posted is None:
                self._posted = self._copies[0]
                self._check_own()
                done = self._posted.post()
            else:
                done = self._posted.poll()
            if not done:
                return False
            del self._copies[0]
            self._posted = None
            if not self._copies:
                self._damage()
        return True

    def _damage(self) -> None:
        rng = self._switch.script.random
        match self._fault.do:
            case "corrupt":
                self._write_as_own(lambda: damage.flip_bit(self._blocks, rng))
            case "truncate":
                self._write_as_own(lambda: damage.poison_tail(self._blocks, rng))
            case "reorder":
                self._write_as_own(lambda: damage.swap_halves(self._blocks))

    def _write_as_own(self, write: Callable[[], None]) -> None:
        self._check_own()
        write()

    def _check_own(self) -> None:
        """Count blocks that somebody else was given since this was posted."""
        self._switch.num_foreign_writes += sum(
            self._switch.generation_of(block_id) != generation
            for block_id, generation in self._generations
        )


async def _changed(
    message: FetchCommand | FetchEvent, kind: str, fault: Fault, script: FaultScript
) -> None:
    """Apply what changes a message, or when it comes, but not whether."""
    part = getattr(message, kind)
    match fault.do:
        case "delay":
            await asyncio.sleep(fault.seconds)
        case "corrupt":
            damage.corrupted(part, fault.field, script.random)
        case "truncate":
            damage.truncated(part, fault.field)

"""One Fetch as its source serves it: admit, announce, confirm, or end with the reason."""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from diptych.block_needs import NeededRun
from diptych.errors import (
    DiptychError,
    InvalidRequestError,
    KVUnprovenError,
    TransferInterruptedError,
)
from diptych.rpc.liveness import Liveness
from diptych.rpc.server import Context, check_decoded
from diptych.rpc.server_stream import last_word
from diptych.rpc.status import to_failure
from diptych.timers import Timers
from diptych.v1 import common_pb2, kv_source_pb2
from diptych.v1.kv_source_pb2 import FetchEvent
from kvtransfer.config import MAX_PROBE_BLOCKS
from kvtransfer.digest import WHOLE, combined_digest, coverages
from kvtransfer.endpoint import TransferEndpoint
from kvtransfer.first_done import first_to_end
from kvtransfer.source.fetch_machine import FetchMachine
from kvtransfer.source.lease_record import AnnouncedRange
from kvtransfer.source.lease_table import LeaseTable
from kvtransfer.source.probe_blocks import ProbeBlocks
from kvtransfer.source.staged_blocks import SlotQueue, StagedBlocks


@dataclass(slots=True)
class SourceCounters:
    """What a worker served since it started, for its metrics. Event loop only."""

    num_fetches_open: int = 0  # now
    num_confirmed: int = 0
    num_refused: Counter[str] = field(default_factory=Counter)  # by error reason
    digest_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SourceDeps:
    """What every Fetch of one source shares. The counters and the table are changed by it."""

    endpoint: TransferEndpoint
    leases: LeaseTable
    probe_blocks: ProbeBlocks
    timers: Timers
    counters: SourceCounters
    progress: Callable[[], common_pb2.EngineProgress]  # the engine's, for heartbeats
    staging: SlotQueue | None = None  # where the pool is on a device and may be read so


class _Changes:
    """What two tasks of a Fetch wait for.

    An object of its own: the machine and the lease hold it, and must not hold the call.
    """

    def __init__(self) -> None:
        self.of_ranges = asyncio.Event()
        self.of_grant = asyncio.Event()

    def note(self) -> None:
        """The lease or its grant changed."""
        self.of_ranges.set()
        self.of_grant.set()


class FetchSession:
    """The handler's state for one stream. Event loop only.

    Five tasks share it; the first to end, with or without an error, ends the stream.
    """

    def __init__(self, deps: SourceDeps, context: Context) -> None:
        self._deps = deps
        self._endpoint = deps.endpoint
        self._changes = _Changes()
        self._machine = FetchMachine(
            deps.leases,
            incarnation=deps.endpoint.incarnation,
            transports=deps.endpoint.transports,
            on_change=self._changes.note,
        )
        self._context = context
        self._write_lock = asyncio.Lock()
        self._writing: asyncio.Future[None] | None = None  # the last write
        self._liveness = Liveness(deps.timers, time.monotonic())
        self._open = kv_source_pb2.FetchOpen()
        self._num_written = 0
        self._num_sent_bytes = 0
        self._probe: AnnouncedRange | None = None
        self._staged: StagedBlocks | None = None  # where the blocks go that way

    async def run(self) -> None:
        """Serve until the reader ends the stream. Raises DiptychError."""
        try:
            async with asyncio.timeout(self._deps.timers.lost_peer_s):
                command = await self._read()
        except TimeoutError:
            raise TransferInterruptedError("the reader did not open") from None
        if command is None:
            return
        if command.WhichOneof("command") != "open":
            raise InvalidRequestError("must come first", field="open")
        self._open = command.open
        if self._open.WhichOneof("what") == "num_probe_blocks":
            self._machine.check_open(self._open)
            if not 1 <= self._open.num_probe_blocks <= MAX_PROBE_BLOCKS:
                raise InvalidRequestError(
                    f"must be 1 to {MAX_PROBE_BLOCKS}", field="num_probe_blocks"
                )
            await self._serve(self._announce_probe)
        else:
            opened = self._machine.open(self._open)
            try:
                await self._serve(partial(self._announce, opened))
            finally:
                self._machine.close()

    async def let_out(self) -> bool:
        """Wait a moment for the event that is on its way out: the last call, after ``run``.

        A call has no room for its status beside it. False: it is stuck.
        """
        if self._writing is not None:
            await asyncio.wait({self._writing}, timeout=self._deps.timers.heartbeat_s / 4)
        return self._writing is None or self._writing.done()

    async def tell(self, error: DiptychError) -> None:
        """Send the reader ``error`` and let it leave: the last call, after ``run`` raised it."""
        if await self.let_out():
            event = self._numbered(FetchEvent(ended=to_failure(error)))
            await last_word(self._context, event, self._deps.timers.lost_peer_s)

    async def _serve(self, announce: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self._open.transport == "staged" and self._deps.staging is not None:
            self._staged = StagedBlocks(self._deps.staging, self._endpoint.thread)
        try:
            await first_to_end(
                receive=self._receive,
                announce=announce,
                guard=self._guard,
                beat=self._beat,
                watch=self._watch,
            )
        finally:
            if self._staged is not None:
                self._staged.close()

    async def _receive(self) -> None:
        while (command := await self._read()) is not None:
            match command.WhichOneof("command"):
                case "confirm":
                    self._confirm(command.confirm)
                    self._deps.counters.num_confirmed += 1
                    await self._write(FetchEvent(confirmed=kv_source_pb2.Confirmed()))
                case "heartbeat":
                    self._liveness.heard(command.heartbeat.progress)
                case "taken":
                    if self._staged is None:
                        raise InvalidRequestError("are not lent", field="taken.slots")
                    self._staged.taken(command.taken.slots)
                case "open":
                    raise InvalidRequestError("comes once", field="open")

    async def _announce_probe(self) -> None:
        """Announce scratch blocks full of random bytes, as soon as there are some."""
        num_blocks = self._open.num_probe_blocks
        num_tokens = num_blocks * self._endpoint.layout.block_size
        await self._write(FetchEvent(opened=kv_source_pb2.FetchOpened(end_token=num_tokens)))
        memory, probe_blocks = self._endpoint.memory, self._deps.probe_blocks
        block_ids = await probe_blocks.take(num_blocks)

        def fill() -> tuple[bytes, ...]:
            memory.write(block_ids, 0, os.urandom(num_blocks * memory.block_bytes))
            return memory.digests(block_ids, [WHOLE] * num_blocks)

        try:
            digests = await self._endpoint.thread.call(fill)
            self._probe = AnnouncedRange(0, num_tokens, block_ids, (0,) * num_blocks, digests, True)
            await self._send(self._probe, [NeededRun(range(num_blocks), memory.block_bytes)])
            await asyncio.Event().wait()  # the reader ends it
        finally:
            # Behind anything the thread may still do to them.
            self._endpoint.thread.submit(_nothing, lambda _, __: probe_blocks.give_back(block_ids))

    async def _announce(self, opened: kv_source_pb2.FetchOpened) -> None:
        await self._write(FetchEvent(opened=opened))
        while True:
            self._changes.of_ranges.clear()
            for ready in self._machine.take_ready():
                first = ready.first_token // self._endpoint.layout.block_size
                places = range(first, first + len(ready.block_ids))
                needed = self._endpoint.needs.runs(places, opened.end_token)
                await self._send(ready, list(needed))
            await self._changes.of_ranges.wait()

    async def _guard(self) -> None:
        """End the stream the moment the grant does, even while a write is stuck."""
        self._changes.of_grant.clear()
        while self._machine.check():
            await self._changes.of_grant.wait()
            self._changes.of_grant.clear()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._deps.timers.heartbeat_s)
            await self._write(
                FetchEvent(heartbeat=common_pb2.Heartbeat(progress=self._deps.progress()))
            )

    async def _watch(self) -> None:
        """End the stream where the reader is silent, or our own transfer thread stands still.

        A reader that waits for a range hears our heartbeats and cannot know the latter.
        """
        timers = self._deps.timers
        while True:
            await asyncio.sleep(timers.heartbeat_s / 2)
            problem = self._liveness.problem(time.monotonic())
            if problem is not None:
                raise TransferInterruptedError(f"the reader is lost: {problem}")
            stuck_s = self._endpoint.thread.stuck_s
            if stuck_s > timers.read_progress_s:
                raise TransferInterruptedError(f"the transfer thread is stuck for {stuck_s:.1f} s")

    async def _send(self, ready: AnnouncedRange, needed: Sequence[NeededRun]) -> None:
        """Announce a range; over inline its bytes follow, and what is staged as it comes.

        needed: the range's blocks, in order, and how much of each.
        """
        inline = self._open.transport == "inline"
        digests, block_ids = ready.digests or (), ready.block_ids
        memory = self._endpoint.memory
        if inline and not digests:  # inline is checked at every level
            num_bytes = [run.num_bytes for run in needed for _ in run.blocks]
            digests = await self._endpoint.thread.call(
                lambda: memory.digests(block_ids, coverages(num_bytes))
            )
        if not inline:
            self._endpoint.expect_reads()
        await self._write(
            FetchEvent(
                range=kv_source_pb2.Range(
                    first_token=ready.first_token,
                    num_tokens=ready.num_tokens,
                    block_ids=block_ids,
                    generations=ready.generations,
                    digests=digests,
                    last=ready.last,
                    sample_seed=ready.sample_seed,
                )
            )
        )
        if not inline and self._staged is None:
            return
        for run in needed:  # a message is of one run
            if run.num_bytes:
                send = self._send_bytes if inline else self._send_staged
                await send(block_ids[: len(run.blocks)], run.num_bytes)
            block_ids = block_ids[len(run.blocks) :]

    async def _send_staged(self, block_ids: tuple[int, ...], num_bytes: int) -> None:
        assert self._staged is not None

        async def write(staged: kv_source_pb2.Staged) -> None:
            await self._write(FetchEvent(staged=staged))

        await self._staged.send(block_ids, num_bytes, self._num_sent_bytes, write)
        self._num_sent_bytes += len(block_ids) * num_bytes

    async def _send_bytes(self, block_ids: tuple[int, ...], num_bytes: int) -> None:
        """Copy and send the first bytes of each; one message is copied while another is sent."""
        thread = self._endpoint.thread
        size, step = len(block_ids) * num_bytes, self._endpoint.config.inline_message_bytes

        def read(begin: int, end: int) -> bytes:
            return self._endpoint.memory.read(block_ids, begin, end, num_bytes)

        copying = thread.begin(partial(read, 0, min(step, size)))
        for begin in range(step, size + step, step):
            payload = await copying
            if begin < size:
                end = min(begin + step, size)
                copying = thread.begin(partial(read, begin, end))
            data = kv_source_pb2.Data(offset=self._num_sent_bytes, payload=payload)
            await self._write(FetchEvent(data=data))
            self._num_sent_bytes += len(payload)

    def _confirm(self, confirm: kv_source_pb2.Confirm) -> None:
        if self._probe is None:
            self._machine.confirm(confirm)
        elif confirm.num_tokens != self._probe.num_tokens or confirm.digest != combined_digest(
            self._probe.digests or ()
        ):
            raise KVUnprovenError("the probe blocks landed differently")

    async def _read(self) -> kv_source_pb2.FetchCommand | None:
        """The reader's next command; None when it closed its side.

        Raises InvalidRequestError: one that cannot be decoded.
        """
        command = await self._context.read()
        if isinstance(command, kv_source_pb2.FetchCommand):
            self._liveness.heard()
            return command
        check_decoded(command)
        return None

    async def _write(self, event: FetchEvent) -> None:
        async with self._write_lock:
            # Who writes may be cancelled, gRPC's write goes on: ``tell`` waits for it.
            writing = asyncio.ensure_future(  # noqa: TID251 (not forgotten: see above)
                self._context.write(self._numbered(event))
            )
            writing.add_done_callback(_see_error)
            self._writing = writing
            await asyncio.shield(writing)

    def _numbered(self, event: FetchEvent) -> FetchEvent:
        self._num_written += 1
        event.number = self._num_written
        return event


def _see_error(writing: asyncio.Future[None]) -> None:
    """Where nobody waits for a write any more, the call is over: its error tells nothing."""
    if not writing.cancelled():
        writing.exception()


def _nothing() -> None:
    """Takes its turn on the transfer thread."""

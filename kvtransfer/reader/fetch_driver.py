"""The shell of one fetch: gRPC stream, reads on the transfer thread, timers."""

import asyncio
import contextlib
import time
from functools import partial
from typing import NamedTuple, TypeAlias

import grpc

from diptych.cancellation import is_told_to_end
from diptych.rpc.call_end import CallEnd
from diptych.rpc.liveness import Liveness
from diptych.rpc.status import from_failure, from_rpc_error
from diptych.timers import Timers
from diptych.v1 import common_pb2, decode_pb2, kv_source_pb2
from diptych.v1.kv_source_pb2 import FetchCommand, FetchEvent
from kvtransfer.endpoint import TransferEndpoint
from kvtransfer.errors import TransportError
from kvtransfer.first_done import first_to_end
from kvtransfer.reader.failures import read_failure, stream_failure
from kvtransfer.reader.posted_reads import Landed, ReadGroup
from kvtransfer.reader.proven_link import Link
from kvtransfer.reader.pull_clock import PullClock
from kvtransfer.reader.pull_machine import (
    DigestChecks,
    PlannedRead,
    PullError,
    PullMachine,
    PullResult,
    PullState,
)
from kvtransfer.reader.quarantine import Quarantine

FetchCall: TypeAlias = "grpc.aio.StreamStreamCall[FetchCommand, FetchEvent]"

MAX_UNWRITTEN_MESSAGES = 8  # inline: received, not yet copied into blocks


class FetchPlan(NamedTuple):
    """What one Fetch asks for and expects."""

    open: kv_source_pb2.FetchOpen
    end_token: int
    prompt_digest: bytes  # empty for a probe
    local_block_ids: tuple[int, ...]

    @property
    def is_probe(self) -> bool:
        return self.open.HasField("num_probe_blocks")


class FetchDriver:
    """One fetch over one link, run once by one task on the event loop."""

    def __init__(
        self,
        plan: FetchPlan,
        link: Link,
        endpoint: TransferEndpoint,
        quarantine: Quarantine,
        timers: Timers,
    ) -> None:
        self._plan = plan
        self._link = link
        self._endpoint = endpoint
        self._quarantine = quarantine
        self._timers = timers
        self._inbox: asyncio.Queue[FetchEvent | Landed | TransportError] = asyncio.Queue()
        self._failure: PullError | None = None  # why we gave up
        self._window = asyncio.Semaphore(MAX_UNWRITTEN_MESSAGES)
        self._write_lock = asyncio.Lock()
        self._reads = ReadGroup(
            endpoint.thread,
            endpoint.memory,
            quarantine,
            link.transport,
            self._inbox.put_nowait,
        )
        self._machine: PullMachine | None = None
        self._lent: dict[int, tuple[int, ...]] = {}  # staging blocks, by the read's first block
        self._clock = PullClock(timers, time.monotonic(), in_queue=plan.is_probe)

    async def run(self) -> PullResult:
        """Pull until proven.

        Waits first for local blocks that an earlier pull's reads may still write.
        Cancelling the task abandons the pull. Raises PullError.
        """
        try:
            return await self._run()
        finally:
            self.abandon()

    def abandon(self) -> frozenset[int]:
        """End the pull now (its task still has to be cancelled). Idempotent, synchronous.

        No read is posted afterwards. Returns the local blocks that posted reads may
        still write; ``on_quarantine`` was called with them, ``on_quarantine_end`` follows.
        """
        if self._machine is not None:
            self._machine.failed()
        return self._reads.abandon()

    async def _run(self) -> PullResult:
        machine = self._machine = PullMachine(
            first_token=self._plan.open.first_token,
            end_token=self._plan.end_token,
            prompt_digest=self._plan.prompt_digest,
            local_block_ids=self._plan.local_block_ids,
            block_size=self._endpoint.layout.block_size,
            num_bytes_of=self._num_bytes_of,
            checks=DigestChecks.of(
                self._endpoint.layout.digest_level,
                inline=self._link.transport == "inline",
                is_probe=self._plan.is_probe,
            ),
        )
        await self._wait_for_blocks(machine)
        call = self._link.stub.Fetch(None)
        try:
            await first_to_end(
                receive=partial(self._receive, call),
                drive=partial(self._drive_or_part, call, machine),
                beat=partial(self._beat, call),
            )
        finally:
            call.cancel()
            self._failure = None  # the same as in _receive
        num_tokens = self._plan.end_token - self._plan.open.first_token
        stats = self._clock.stats(self._link.transport, machine.num_bytes, num_tokens)
        return PullResult(stats=stats)

    def _num_bytes_of(self, block_index: int) -> int:
        """What comes of a block: what its sequence needs, of a probe all."""
        if self._plan.is_probe:
            return self._endpoint.memory.block_bytes
        return self._endpoint.needs.num_bytes_of(block_index, self._plan.end_token)

    async def _wait_for_blocks(self, machine: PullMachine) -> None:
        while not machine.begin(self._quarantine.block_ids):
            problem = self._clock.problem(time.monotonic(), machine, silence_s=0.0)
            if problem is not None:
                raise problem
            await asyncio.sleep(0.005)

    async def _receive(self, call: FetchCall) -> None:
        """Read the stream into the inbox. Never returns: raises how the pull ended with it."""
        failure = PullError(decode_pb2.PULL_FAILURE_SOURCE_LOST, "the source ended the stream")
        end = CallEnd(call)
        try:
            await self._write(call, FetchCommand(open=self._plan.open))
            while isinstance(event := await call.read(), FetchEvent):  # until EOF
                if event.HasField("ended"):
                    failure = stream_failure(from_failure(event.ended))
                    break
                if event.HasField("data") and self._failure is None:
                    await self._window.acquire()
                self._inbox.put_nowait(event)
            else:
                if event is None:  # gRPC's word for a message that does not parse
                    failure = PullError(failure.failure, "a message of the source cannot be read")
        except grpc.aio.AioRpcError as error:
            said = await end.error(error)
            if said is not None:
                failure = stream_failure(from_rpc_error(said))
        except asyncio.CancelledError:
            if is_told_to_end():
                raise
            # the peer's status was CANCELLED
            failure = PullError(decode_pb2.PULL_FAILURE_SOURCE_LOST, "the source cancelled")
        try:
            raise self._failure or failure
        finally:
            del failure  # no reference cycle may keep the call

    async def _beat(self, call: FetchCall) -> None:
        while True:
            await asyncio.sleep(self._timers.heartbeat_s)
            await self._write(call, FetchCommand(heartbeat=common_pb2.Heartbeat()))

    async def _write(self, call: FetchCall, command: FetchCommand) -> None:
        async with self._write_lock:
            # Raised when the call ended: _receive knows how.
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(command)

    async def _drive_or_part(self, call: FetchCall, machine: PullMachine) -> None:
        """Drive; where we give up, let the source end the stream before anybody hears of it.

        Else the fetch might still be open there when the router has granted the next one.
        """
        try:
            await self._drive(call, machine)
        except PullError as error:
            if error.failure != decode_pb2.PULL_FAILURE_SOURCE_LOST:
                self._failure = error  # _receive raises it
                self._window.release()
                await self._part(call)
            raise

    async def _part(self, call: FetchCall) -> None:
        """Half-close; _receive ends this wait once the source has ended the stream."""
        with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            async with asyncio.timeout(self._timers.heartbeat_s / 4):
                async with self._write_lock:
                    await call.done_writing()
                await asyncio.Event().wait()

    async def _drive(self, call: FetchCall, machine: PullMachine) -> None:
        """The one task that moves the machine. Returns once the pull is proven."""
        liveness = Liveness(self._timers, time.monotonic())
        self._clock.moved(time.monotonic())
        while machine.state is not PullState.PROVEN:
            item: FetchEvent | Landed | TransportError | None = None
            try:
                async with asyncio.timeout(self._timers.heartbeat_s / 2):
                    item = await self._inbox.get()
            except TimeoutError:
                pass
            confirm = None
            if isinstance(item, FetchEvent):
                liveness.heard(item.heartbeat.progress if item.HasField("heartbeat") else None)
                self._on_event(machine, item)
            elif isinstance(item, Landed):
                confirm = self._on_landed(machine, item)
                await self._give_back(call, item)
            elif isinstance(item, TransportError):
                raise read_failure(item) from item
            if confirm is not None:
                await self._write(call, FetchCommand(confirm=confirm))
            self._check_timers(machine, liveness)

    def _on_event(self, machine: PullMachine, event: FetchEvent) -> None:
        machine.numbered(event.number)
        match event.WhichOneof("event"):
            case "opened":
                machine.opened(event.opened)
                self._clock.moved(time.monotonic())
            case "range":
                self._on_range(machine, event.range)
            case "data":
                self._on_data(machine, event.data)
            case "staged":
                self._read(machine.staged(event.staged))
            case "confirmed":
                machine.confirmed()
                self._clock.proven(time.monotonic())

    def _on_range(self, machine: PullMachine, announced: kv_source_pb2.Range) -> None:
        self._clock.announced(time.monotonic(), idle=not machine.num_unlanded_blocks)
        for planned in machine.announced(announced):
            if not self._link.way.staged_at_source:  # else it says where, block by block
                self._read(planned)

    def _read(self, planned: PlannedRead) -> None:
        """Post it in pieces; over inline its bytes come by themselves."""
        step = max(1, self._endpoint.config.max_read_bytes // planned.num_bytes)
        for begin in range(0, len(planned.local_block_ids), step):
            local_block_ids = planned.local_block_ids[begin : begin + step]
            source_block_ids = planned.source_block_ids[begin : begin + step]
            try:
                copy = self._link.peer.read(source_block_ids, local_block_ids, planned.num_bytes)
            except TransportError as error:
                raise PullError(decode_pb2.PULL_FAILURE_UNPROVEN, str(error)) from error
            if self._link.way.staged_at_source:
                self._lent[planned.first_block + begin] = source_block_ids
            if copy is not None:
                self._reads.start(
                    copy,
                    local_block_ids,
                    first_block=planned.first_block + begin,
                    num_completed=len(local_block_ids),
                    to_digest=planned.to_digest[begin : begin + step],
                )

    def _on_data(self, machine: PullMachine, data: kv_source_pb2.Data) -> None:
        planned = machine.received(data)
        try:
            copy = self._link.peer.write(
                planned.local_block_ids, planned.offset, data.payload, planned.num_bytes
            )
        except TransportError as error:
            raise PullError(decode_pb2.PULL_FAILURE_UNPROVEN, str(error)) from error
        self._reads.start(
            copy,
            planned.local_block_ids,
            first_block=planned.first_block,
            num_completed=planned.num_completed,
            to_digest=planned.to_digest,
        )

    def _on_landed(self, machine: PullMachine, landed: Landed) -> kv_source_pb2.Confirm | None:
        inline = self._link.transport == "inline"
        if inline:
            self._window.release()
        started_s = None if inline else landed.started_s
        self._clock.landed(time.monotonic(), started_s, landed.ended_s, landed.digest_s)
        if not landed.num_blocks:
            return None
        return machine.landed(landed.first_block, landed.num_blocks, landed.digests)

    async def _give_back(self, call: FetchCall, landed: Landed) -> None:
        """What was read of the source's staging blocks is not needed there any more."""
        slots = self._lent.pop(landed.first_block, None)
        if slots is not None:
            await self._write(call, FetchCommand(taken=kv_source_pb2.Taken(slots=slots)))

    def _check_timers(self, machine: PullMachine, liveness: Liveness) -> None:
        now = time.monotonic()
        if self._window.locked():  # we do not listen: that nothing is heard tells nothing
            liveness.heard()
        lost = liveness.problem(now)
        if lost is not None:
            raise PullError(decode_pb2.PULL_FAILURE_SOURCE_LOST, f"the source is lost: {lost}")
        problem = self._clock.problem(now, machine, liveness.silent_s)
        if problem is not None:
            raise problem

"""Readers and sources of KV in one process and in virtual time, to count what their probes do.

Pairs, probes, pulls and the source's queue are the real ones. Stand-ins are the wire, the
transfer thread (each job takes its time) and a transport that copies from pool to pool.
"""

import asyncio
from collections.abc import Callable, Sequence
from itertools import count
from random import Random
from typing import Any, NamedTuple, cast

import grpc
import pytest

from diptych.errors import DiptychError
from diptych.rpc import peer_channel
from diptych.rpc.peer_channel import Dialer
from diptych.rpc.server import Context
from diptych.timers import Timers
from diptych.v1 import common_pb2, worker_pb2
from diptych.v1.kv_source_pb2 import (
    ConnectRequest,
    ConnectResponse,
    FetchCommand,
    FetchEvent,
    MemoryDescriptor,
)
from diptych.worker.scratch import PoolScratch
from kvtransfer.config import TransferConfig
from kvtransfer.endpoint import TransferEndpoint
from kvtransfer.memory import HostMemory
from kvtransfer.reader import pairs
from kvtransfer.reader.pairs import PairTable, PeerKey
from kvtransfer.source.lease_table import LeaseTable
from kvtransfer.source.servicer import KVSourceServicer
from kvtransfer.transports.thread import TransferThread
from tests.virtual_time import run_virtually

BLOCK_BYTES = 64
CONFIG = TransferConfig(transports=("nixl",))
LAYOUT = common_pb2.KVLayout(block_size=16, block_bytes=BLOCK_BYTES, digest_level="full")
_END = object()  # of a stream
_LOOK_EVERY_S = 0.1
_PATIENCE_S = 3600.0


class VirtualThread(TransferThread):
    """Jobs in order, each of which takes ``job_s``; all on the event loop."""

    def __init__(self, job_s: float) -> None:
        super().__init__()
        self._job_s = job_s
        self._free_at = 0.0

    def _put(self, job: Callable[[], None] | None) -> None:
        assert job is not None
        loop = asyncio.get_running_loop()
        self._free_at = max(self._free_at, loop.time()) + self._job_s
        loop.call_at(self._free_at, self._guarded, job)


class CountedScratch(PoolScratch):
    """Knows how many blocks were lent at once."""

    most_lent = 0

    def allocate(self, num_blocks: int) -> list[int]:
        block_ids = super().allocate(num_blocks)
        self.most_lent = max(self.most_lent, self.num_lent)
        return block_ids


class Process:
    """What both sides have."""

    def __init__(self, incarnation: str, job_s: float) -> None:
        num_blocks = CONFIG.num_scratch_blocks
        self.memory = HostMemory(bytearray(num_blocks * BLOCK_BYTES), BLOCK_BYTES)
        self.scratch = CountedScratch(range(num_blocks))
        self.endpoint = TransferEndpoint(CONFIG, incarnation, LAYOUT, self.memory)
        self.endpoint.thread = VirtualThread(job_s)


class Source(Process):
    """A prefill worker's end. Nobody listens at its address before ``up_at``."""

    def __init__(self, number: int, job_s: float, up_at: float) -> None:
        super().__init__(f"source-{number}", job_s)
        self.key = PeerKey(f"source:{number}", self.endpoint.incarnation)
        self.asked_at: list[float] = []
        self.num_fetches = 0
        self.num_bytes_read = 0
        self.endpoint.transports["nixl"] = CopyTransport(self.memory, (), number)
        self.servicer = KVSourceServicer(
            self.endpoint,
            LeaseTable(LAYOUT.block_size, lambda _: 0),
            scratch=self.scratch,
            timers=Timers(),
        )
        self._up_at = up_at

    async def connect(self, request: ConnectRequest, **options: float) -> ConnectResponse:
        """What a call of Connect comes to."""
        now = asyncio.get_running_loop().time()
        self.asked_at.append(now)
        if now < self._up_at:
            raise _rpc_error(grpc.StatusCode.UNAVAILABLE)
        try:
            async with asyncio.timeout(options["timeout"]):
                return await self.servicer.Connect(request, cast(Context, None))
        except TimeoutError:
            raise _rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED) from None


def _rpc_error(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, nothing, nothing, code.name, code.name)


class Reader(Process):
    """A decode worker's end."""

    def __init__(self, number: int, job_s: float, sources: Sequence[Source]) -> None:
        super().__init__(f"reader-{number}", job_s)
        self.endpoint.transports["nixl"] = CopyTransport(self.memory, sources)
        self.pairs = PairTable(
            self.endpoint,
            scratch=self.scratch,
            dialer=Dialer(Timers()),
            on_change=lambda: None,
            on_quarantine=lambda _: None,
            on_quarantine_end=lambda _: None,
        )
        self.pairs.set_peers("router", [source.key for source in sources])

    @property
    def is_proven(self) -> bool:
        """To each source."""
        return all(pair.state == worker_pb2.PAIR_STATE_PROVEN for pair in self.pairs.pairs())


class CopyTransport:
    """Copies from the memory of one of ``sources``, which it is told by number."""

    name = "nixl"
    ready = True
    problem = ""
    retiring = False
    undead = None

    def __init__(self, memory: HostMemory, sources: Sequence[Source], number: int = 0) -> None:
        self._memory = memory
        self._sources = sources
        self._number = number  # of the source that it is of

    def descriptor(self) -> MemoryDescriptor:
        return MemoryDescriptor(base_address=self._number)

    def connect(self, descriptor: MemoryDescriptor) -> "CopyPeer":
        return CopyPeer(self._memory, self._sources[descriptor.base_address])

    def serve(self, active: bool) -> None: ...

    def rebuild(self) -> None: ...

    def close(self) -> None: ...


class CopyPeer:
    """One source, whose bytes are counted as they go."""

    usable = True

    def __init__(self, memory: HostMemory, source: Source) -> None:
        self._memory = memory
        self._source = source

    def read(
        self,
        source_block_ids: tuple[int, ...],
        local_block_ids: tuple[int, ...],
        num_bytes: int | None = None,
    ) -> "_Copy":
        assert num_bytes == BLOCK_BYTES, "a probe is of whole blocks"
        return _Copy(lambda: self._move(source_block_ids, local_block_ids))

    def write(
        self,
        local_block_ids: tuple[int, ...],
        offset: int,
        payload: bytes,
        num_bytes: int | None = None,
    ) -> "_Copy":
        raise AssertionError("a source of this transport sends nothing")

    def check_lane(self) -> None: ...

    def close(self) -> None: ...

    def _move(self, source_block_ids: tuple[int, ...], local_block_ids: tuple[int, ...]) -> None:
        num_bytes = len(source_block_ids) * BLOCK_BYTES
        payload = self._source.memory.read(source_block_ids, 0, num_bytes)
        self._memory.write(local_block_ids, 0, payload)
        self._source.num_bytes_read += num_bytes


class _Copy(NamedTuple):
    move: Callable[[], None]
    wakes: bool = False

    def post(self) -> bool:
        self.move()
        return True

    def poll(self) -> bool:
        return True


class Channel:
    """A reader's connection to a source: as much of grpc.aio.Channel as a pair needs."""

    def __init__(self, source: Source, handlers: asyncio.TaskGroup) -> None:
        self._source = source
        self._handlers = handlers

    async def close(self, grace: float | None) -> None: ...

    def unary_unary(self, method: str, **_: object) -> Any:
        return self._source.connect

    def stream_stream(self, method: str, **_: object) -> Any:
        return lambda _: Call(self._source, self._handlers)

    def get_state(self) -> grpc.ChannelConnectivity:
        return grpc.ChannelConnectivity.READY

    async def wait_for_state_change(self, state: grpc.ChannelConnectivity) -> None:
        await asyncio.Event().wait()


class Call:
    """One Fetch, the reader's end; ``_Context`` is the other one."""

    def __init__(self, source: Source, handlers: asyncio.TaskGroup) -> None:
        source.num_fetches += 1
        self._context = _Context()
        self._handler = handlers.create_task(self._handle(source))

    async def write(self, command: FetchCommand) -> None:
        self._context.commands.put_nowait(command)

    async def read(self) -> object:
        return await self._context.events.get()

    async def done_writing(self) -> None:
        self._context.commands.put_nowait(_END)

    def add_done_callback(self, callback: object) -> None: ...

    def cancel(self) -> bool:
        return self._handler.cancel()

    async def _handle(self, source: Source) -> None:
        context: Any = self._context
        try:
            async for _ in source.servicer.Fetch(context, context):
                raise AssertionError("it writes")
        except DiptychError:
            pass  # the last event said so
        finally:
            self._context.events.put_nowait(_END)


class _Context:
    def __init__(self) -> None:
        self.commands: asyncio.Queue[object] = asyncio.Queue()
        self.events: asyncio.Queue[object] = asyncio.Queue()

    async def read(self) -> object:
        return await self.commands.get()

    async def write(self, event: FetchEvent) -> None:
        self.events.put_nowait(event)


class Storm(NamedTuple):
    """All that took part, once everybody is proven to everybody."""

    readers: list[Reader]
    sources: list[Source]


def storm(num_readers: int, num_sources: int, *, job_s: float, up_at: float = 0.0) -> Storm:
    """Let all readers get to know all sources at once, and wait until each pair is proven.

    ``job_s`` is what each thing takes that a transfer thread does; ``up_at``, when sources
    can be reached, s.
    """
    return run_virtually(_storm(num_readers, num_sources, job_s, up_at))


async def _storm(num_readers: int, num_sources: int, job_s: float, up_at: float) -> Storm:
    seeds = count(1)
    sources = [Source(number, job_s, up_at) for number in range(num_sources)]
    by_address = {source.key.address: source for source in sources}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairs, "Random", lambda: Random(next(seeds)))
        async with asyncio.timeout(_PATIENCE_S), asyncio.TaskGroup() as handlers:
            patch.setattr(
                peer_channel,
                "open_channel",
                lambda address, _: Channel(by_address[address], handlers),
            )
            readers = [Reader(number, job_s, sources) for number in range(num_readers)]
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(reader.pairs.run()) for reader in readers]
                while not all(reader.is_proven for reader in readers):
                    await asyncio.sleep(_LOOK_EVERY_S)
                for task in running:
                    task.cancel()
            # what sources still do behind their readers' backs
            await asyncio.sleep(10 * job_s)
    return Storm(readers, sources)

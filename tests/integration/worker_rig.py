"""Prefill and decode workers inside the test's process, over real gRPC on 127.0.0.1."""

import asyncio
import itertools
import json
import secrets
from collections import defaultdict
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from decode_worker import app as decode_app
from decode_worker.config import DecodeWorkerConfig
from diptych.rpc.call_end import CallEnd
from diptych.rpc.channel import open_channel
from diptych.rpc.status import from_failure, from_rpc_error
from diptych.timers import Timers
from diptych.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from kvtransfer.config import TransferConfig
from prefill_worker import app as prefill_app
from prefill_worker.config import PrefillWorkerConfig
from soft_worker import app as soft_app
from soft_worker.config import SoftWorkerConfig
from tests import metrics
from tests.call_ends import told
from tests.cluster import START_TIMEOUT_S
from tests.waiting import within

BLOCK_SIZE = 16
MAX_LEN = 256
PATIENCE_S = 6.0  # with a worker that is ready
HELD = ("running", "reserved", "leased", "quarantined")
Settings = Mapping[str, Any]
INLINE = TransferConfig(transports=("inline",))
ROUTER = "router"  # the incarnation of a test's only one

_port_files = itertools.count(1)
# Of what each router asks for: two have the same ones, as in service.
_sequence_ids: defaultdict[str, Iterator[int]] = defaultdict(lambda: itertools.count(1))
_untyped: Any = grpc.aio  # the stubs lack it
EOF = _untyped.EOF


@dataclass
class Worker:
    """A worker that runs in this process."""

    address: str
    metrics_address: str
    channel: grpc.aio.Channel
    stop: asyncio.Event
    serving: "asyncio.Task[None]"
    service: str = prefill_app.PREFILL  # the role's own

    async def state(self) -> worker_pb2.WorkerState:
        """What Watch says first."""
        call = worker_pb2_grpc.WorkerStub(self.channel).Watch(worker_pb2.WatchRequest())
        async for state in call:
            call.cancel()
            return state
        raise AssertionError("Watch said nothing")

    async def watch_until(
        self, wanted: Callable[[worker_pb2.WorkerState], bool], within_s: float = PATIENCE_S
    ) -> worker_pb2.WorkerState:
        """The first state on Watch that is ``wanted``."""
        call = worker_pb2_grpc.WorkerStub(self.channel).Watch(worker_pb2.WatchRequest())
        async with within(within_s):
            async for state in call:
                if wanted(state):
                    call.cancel()
                    return state
        raise AssertionError("Watch ended")

    async def wait_ready(self) -> worker_pb2.WorkerState:
        """Its first state that is ready; where no kernel was kept, they are compiled first."""
        return await self.watch_until(
            lambda s: s.state == worker_pb2.SERVING_STATE_READY, START_TIMEOUT_S
        )

    async def health(
        self, service: str | None = None
    ) -> "health_pb2.HealthCheckResponse.ServingStatus":
        """Of ``service``: of the role's own if none is named; "" is the whole process."""
        service = self.service if service is None else service
        request = health_pb2.HealthCheckRequest(service=service)
        response = await health_pb2_grpc.HealthStub(self.channel).Check(request)
        return response.status

    async def metrics(self) -> dict[str, float]:
        """Its Prometheus samples by ``name{labels}``."""
        return await asyncio.to_thread(metrics.scrape, self.metrics_address)

    async def blocks(self) -> dict[str, int]:
        return metrics.blocks_of(await self.metrics())

    async def wait_blocks(self, wanted: Callable[[dict[str, int]], bool], what: str) -> None:
        counts: dict[str, int] = {}
        try:
            async with within(3):
                while not wanted(counts := await self.blocks()):
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"{what}: {counts}") from None

    async def wait_baseline(self) -> None:
        """Wait until every block is free or cached."""
        await self.wait_blocks(lambda b: not any(b[o] for o in HELD), "blocks are still held")


@asynccontextmanager
async def _running(
    serve: Callable[[Any, asyncio.Event, Callable[[int], None]], Awaitable[None]],
    config: PrefillWorkerConfig | DecodeWorkerConfig,
) -> AsyncIterator[Worker]:
    stop, ports = asyncio.Event(), asyncio.Queue[int]()
    is_decode = isinstance(config, DecodeWorkerConfig)
    service = decode_app.DECODE if is_decode else prefill_app.PREFILL
    assert config.port_file is not None

    async def run() -> None:
        await serve(config, stop, ports.put_nowait)

    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(run(), name=config.role)
        await ports.get()
        addresses = json.loads(config.port_file.read_text())
        async with open_channel(addresses["address"]) as channel:
            metrics_address = addresses["metrics_address"]
            try:
                yield Worker(addresses["address"], metrics_address, channel, stop, serving, service)
            finally:
                stop.set()
                await asyncio.wait([serving], timeout=10)
        assert serving.done(), "the worker does not stop"


@asynccontextmanager
async def prefill_worker(
    model: Path, tmp_path: Path, settings: Settings, *, wait_ready: bool = True, **more: Any
) -> AsyncIterator[Worker]:
    """A prefill worker that is ready (or, unless ``wait_ready``, has begun to listen)."""
    config = PrefillWorkerConfig(**_common(model, tmp_path / "prefill.json", settings, more))
    async with _running(prefill_app.serve, config) as worker:
        if wait_ready:
            await worker.wait_ready()
        yield worker


@asynccontextmanager
async def decode_worker(
    model: Path, tmp_path: Path, settings: Settings, *, wait_ready: bool = True, **more: Any
) -> AsyncIterator[Worker]:
    """A decode worker that is ready (or, unless ``wait_ready``, has loaded its model)."""
    config = DecodeWorkerConfig(**_common(model, tmp_path / "decode.json", settings, more))
    async with _running(decode_app.serve, config) as worker:
        if wait_ready:
            await worker.wait_ready()
        else:
            await worker.watch_until(lambda s: s.max_model_len > 0, START_TIMEOUT_S)
        yield worker


@asynccontextmanager
async def soft_worker(
    model: Path, tmp_path: Path, settings: Settings, *roles: str
) -> AsyncIterator[Worker]:
    """A worker that has these roles and could have either; it is ready."""
    config = SoftWorkerConfig(**_common(model, tmp_path / "soft.json", settings), roles=roles)
    async with _running(soft_app.serve, config) as worker:
        await worker.wait_ready()
        yield worker


def _common(
    model: Path, port_file: Path, settings: Settings, more: Settings = MappingProxyType({})
) -> dict[str, Any]:
    return {
        "model": str(model),
        "port_file": port_file.with_name(f"{next(_port_files)}-{port_file.name}"),
        "metrics_port": 0,
        "num_threads": 1,
        "step_trials_s": 0.0,
        **settings,
        **more,
    }


def quick(**timers: float) -> Timers:
    """Timers with some of them short."""
    return Timers(**timers)


def spec(
    token_ids: Sequence[int], *, max_tokens: int = 8, num_output: int = 0, margins: bool = False
) -> common_pb2.SequenceSpec:
    """Greedy, and never ended by a stop token."""
    return common_pb2.SequenceSpec(
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids) - num_output,
        sampling=common_pb2.SamplingParams(
            temperature=0, seed=1, max_tokens=max_tokens, return_margins=margins
        ),
    )


class Lease:
    """One Prefill stream, as a router drives it."""

    def __init__(self, worker: Worker) -> None:
        self.sequence_id = next(_sequence_ids[ROUTER])
        self._grants = itertools.count(1)
        self._unread: list[prefill_pb2.PrefillEvent] = []
        stub: Any = prefill_pb2_grpc.PrefillStub(worker.channel)
        self.call = stub.Prefill()
        self._end = CallEnd(self.call)

    async def start(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int = 8,
        margins: bool = False,
        payer: bytes = b"",
    ) -> None:
        start = prefill_pb2.PrefillStart(
            router_incarnation=ROUTER,
            sequence_id=self.sequence_id,
            request_id="r",
            spec=spec(token_ids, max_tokens=max_tokens, margins=margins),
        )
        start.spec.payer = payer
        await self.call.write(prefill_pb2.PrefillCommand(start=start))

    async def grant(self, reader_incarnation: str) -> bytes:
        """Grant a new ticket and wait for Granted."""
        ticket = secrets.token_bytes(16)
        grant = prefill_pb2.Grant(
            grant_id=next(self._grants), ticket=ticket, reader_incarnation=reader_incarnation
        )
        await self.call.write(prefill_pb2.PrefillCommand(grant=grant))
        granted = (await self.next("granted")).granted
        assert granted.grant_id == grant.grant_id
        return ticket

    async def next(self, kind: str) -> prefill_pb2.PrefillEvent:
        """The next event of this kind; others but heartbeats are kept for later."""
        for event in self._unread:
            if event.WhichOneof("event") == kind:
                self._unread.remove(event)
                return event
        async with within(PATIENCE_S):
            while (read := await self._read()) is not None:
                if read.WhichOneof("event") == kind:
                    return read
                if read.WhichOneof("event") != "heartbeat":
                    self._unread.append(read)
        raise AssertionError(f"ended before {kind}")

    async def error(self) -> None:
        """Read to the end; raises the error that ended the stream."""
        async with within(PATIENCE_S):
            while await self._read() is not None:
                pass
        assert await self.call.code() is grpc.StatusCode.OK

    async def _read(self) -> prefill_pb2.PrefillEvent | None:
        try:
            async with told(self._end):
                event = await self.call.read()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        if event is not EOF and event.HasField("ended"):
            self.call.cancel()
            raise from_failure(event.ended)
        return None if event is EOF else event

    async def close(self) -> None:
        """Half-close, as a router does that is done with the lease."""
        await self.call.done_writing()
        await self.error()


@dataclass
class Said:
    """What a decode worker said of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    position: int | None = None
    ended: decode_pb2.Ended | None = None


class Router:
    """One Decode stream, as a router drives it."""

    def __init__(
        self,
        worker: Worker,
        incarnation: str = ROUTER,
        channel: grpc.aio.Channel | None = None,
    ) -> None:
        self.incarnation = incarnation
        stub: Any = decode_pb2_grpc.DecodeStub(channel or worker.channel)
        self.call = stub.Decode()
        self._end = CallEnd(self.call)
        self.said: dict[int, Said] = {}
        self.num_messages = 0
        self.worker_incarnation = ""

    async def open(self, peers: Iterable[decode_pb2.Peer] = ()) -> None:
        hello = decode_pb2.Hello(router_incarnation=self.incarnation)
        await self.send(hello=hello)
        self.worker_incarnation = (await self.next("welcome")).welcome.incarnation
        await self.send(peers=decode_pb2.Peers(peers=peers))

    async def send(self, **command: Any) -> None:
        await self.call.write(decode_pb2.DecodeCommand(**command))

    async def reserve(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int = 8,
        num_output: int = 0,
        to_pull: bool = False,
    ) -> tuple[int, int]:
        """Reserve and wait; (sequence id, cached tokens). Others may end meanwhile."""
        sequence_id = await self.ask(
            token_ids, max_tokens=max_tokens, num_output=num_output, to_pull=to_pull
        )
        reserved = (await self.next("reserved", others_may_end=True)).reserved
        assert reserved.sequence_id == sequence_id
        return sequence_id, reserved.num_cached_tokens

    async def ask(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int = 8,
        num_output: int = 0,
        to_pull: bool = False,
    ) -> int:
        """Send Reserve; the sequence id."""
        sequence_id = next(_sequence_ids[self.incarnation])
        self.said[sequence_id] = Said()
        asked = spec(token_ids, max_tokens=max_tokens, num_output=num_output, margins=True)
        await self.send(
            reserve=decode_pb2.Reserve(sequence_id=sequence_id, spec=asked, to_pull=to_pull)
        )
        return sequence_id

    async def read(self) -> decode_pb2.DecodeEvent:
        """The next event of any kind; tokens and ends are booked in ``said``."""
        try:
            async with told(self._end):
                event: decode_pb2.DecodeEvent = await self.call.read()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        assert event is not EOF, "the stream ended"
        self.num_messages += 1
        for entry in event.step.sequences:
            said = self.said[entry.sequence_id]
            assert said.ended is None, "tokens after Ended"
            if said.position is None:
                said.position = entry.position
            assert entry.position == said.position + len(said.token_ids), "a gap"
            said.token_ids += entry.token_ids
            said.margins += entry.margins
        if event.WhichOneof("event") == "ended":
            assert self.said[event.ended.sequence_id].ended is None, "Ended twice"
            self.said[event.ended.sequence_id].ended = event.ended
        return event

    async def next(self, kind: str, *, others_may_end: bool = False) -> decode_pb2.DecodeEvent:
        """The next event that is neither heartbeat nor tokens; it must be of this kind.

        ``others_may_end``: nor the end of a sequence that has all its tokens.
        """
        passing = {"heartbeat", "step"} - {kind}
        async with within(PATIENCE_S):
            while True:
                event = await self.read()
                if event.WhichOneof("event") in passing:
                    continue
                if others_may_end and event.ended.finish_reason:
                    continue
                assert event.WhichOneof("event") == kind, event
                return event

    async def until_ended(self, *sequence_ids: int) -> list[Said]:
        """Read until each of them has ended (for ever, if there is no such sequence)."""
        async with within(PATIENCE_S):
            while any(
                each not in self.said or self.said[each].ended is None for each in sequence_ids
            ):
                await self.read()
        return [self.said[each] for each in sequence_ids]

    async def start(
        self, sequence_id: int, emitted: Sequence[int] = (), *, compute_missing: bool = False
    ) -> None:
        start = decode_pb2.Start(
            sequence_id=sequence_id, emitted_token_ids=emitted, compute_missing=compute_missing
        )
        await self.send(start=start)

    async def bind(
        self, sequence_id: int, source: decode_pb2.Peer, ticket: bytes, first: int, bind_id: int = 1
    ) -> None:
        bind = decode_pb2.Bind(
            sequence_id=sequence_id,
            bind_id=bind_id,
            source_address=source.address,
            source_incarnation=source.incarnation,
            ticket=ticket,
            first_missing_token=first,
        )
        await self.send(bind=bind)

    async def release(self, sequence_id: int) -> None:
        await self.send(release=decode_pb2.Release(sequence_id=sequence_id))

    async def generate(self, token_ids: Sequence[int], num_tokens: int) -> Said:
        """Compute prompt and output on this worker alone."""
        sequence_id, _ = await self.reserve(token_ids, max_tokens=num_tokens)
        await self.start(sequence_id, compute_missing=True)
        return (await self.until_ended(sequence_id))[0]

    async def close(self) -> None:
        self.call.cancel()


async def peer_of(worker: Worker) -> decode_pb2.Peer:
    state = await worker.state()
    return decode_pb2.Peer(address=worker.address, incarnation=state.incarnation)


async def until_proven(worker: Worker) -> worker_pb2.WorkerState:
    """Wait until it may pull from someone."""
    return await worker.watch_until(
        lambda s: any(p.state == worker_pb2.PAIR_STATE_PROVEN for p in s.pairs)
    )


async def leased(prefill: Worker, tokens: list[int], reader: str) -> tuple[Lease, bytes, int]:
    """Start a lease and grant it: (lease, ticket, first token)."""
    lease = Lease(prefill)
    await lease.start(tokens)
    await lease.next("accepted")
    ticket = await lease.grant(reader)
    first = (await lease.next("first_token")).first_token
    return lease, ticket, first.token_id

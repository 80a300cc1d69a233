"""Prefill and decode workers without an engine: they keep the protocol, or break it as told.

Real gRPC servers whose tokens are a pure function of the position, so a test
knows every right answer. What they hold is in ``leases`` and ``reservations``.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from diptych.errors import DiptychError, NoWorkerError
from diptych.rpc.server import Context, make_server
from diptych.rpc.status import to_failure
from diptych.step_model import StepModel
from diptych.v1 import (
    cache_pb2,
    cache_pb2_grpc,
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

HEARTBEAT_S = 0.1
NUM_CACHED_TOKENS = 3  # of each prompt, on a prefill worker
BLOCK_SIZE = 16
MAX_LEN = 1_000_000
POOLED = [3.0, 4.0, *[0.0] * 62]  # the hidden states of every prompt, of the tiny model's width
_incarnations = itertools.count(1)


def token_at(position: int) -> int:
    """What every worker samples at ``position`` of any sequence."""
    return 20 + position % 200


@dataclass(kw_only=True)
class Behaviour:
    """How a worker answers; tests change it while it runs."""

    refuse: DiptychError | None = None
    accepts: bool = True  # else it says nothing to a new sequence
    tells_pending: bool = False  # on Watch, what waits; else a router takes it to be idle
    silent: bool = False  # no event leaves any more, not even a heartbeat
    stalled: bool = False  # heartbeats say that the engine is stuck
    first_token_s: float = 0.0  # Accepted until FirstToken
    step_s: float = 0.002
    tokens_per_step: int = 1
    pull_failures: int = 0  # so many pulls fail first
    pull_failure: int = decode_pb2.PULL_FAILURE_TRANSPORT
    pull_s: float = 0.0
    tells_prompts: bool = True  # else it is older than what a request may want of its prompt


class QuietCache(cache_pb2_grpc.CacheServicer):
    """Of a worker that has told nothing yet of what it has cached."""

    async def WatchCache(
        self, request: cache_pb2.WatchCacheRequest, context: Context
    ) -> AsyncIterator[cache_pb2.CacheChange]:
        await asyncio.get_running_loop().create_future()
        return
        yield


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """What both kinds share: a server, Watch, heartbeats."""

    role = worker_pb2.WORKER_ROLE_UNSPECIFIED
    watch_gap_s = 0.02  # a real one lets more time pass, unless there is news

    def __init__(self) -> None:
        self.behaviour = Behaviour()
        self.incarnation = ""
        self.state = worker_pb2.SERVING_STATE_READY
        self.local_prefill = True
        self.model_digest = "a" * 32
        self.step_model = StepModel()
        self.address = "127.0.0.1:0"
        self.pairs: list[worker_pb2.Pair] = []
        self.request_ids: list[str] = []
        self.specs: list[common_pb2.SequenceSpec] = []
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Listen; a new incarnation at the old address if there was one."""
        self.incarnation = f"{type(self).__name__}-{next(_incarnations)}"
        self._server = make_server()
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        cache_pb2_grpc.add_CacheServicer_to_server(QuietCache(), self._server)
        self.add_services(self._server)
        port = self._server.add_insecure_port(self.address)
        self.address = f"127.0.0.1:{port}"
        await self._server.start()

    def add_services(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError

    async def kill(self) -> None:
        """End at once, as a killed process does."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(None)

    @property
    def num_pending_tokens(self) -> int:
        """Of prompts that wait to be computed."""
        return 0

    def progress(self) -> common_pb2.EngineProgress:
        return common_pb2.EngineProgress(
            num_steps=7, step_due=self.behaviour.stalled, predicted_step_s=0.01
        )

    async def EndTraces(
        self, request: worker_pb2.EndTracesRequest, context: Context
    ) -> worker_pb2.EndTracesResponse:
        return worker_pb2.EndTracesResponse(time_s=time.time())

    async def Watch(
        self, request: worker_pb2.WatchRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WorkerState]:
        while True:
            if not self.behaviour.silent:
                yield worker_pb2.WorkerState(
                    incarnation=self.incarnation,
                    role=self.role,
                    state=self.state,
                    layout=common_pb2.KVLayout(
                        block_size=BLOCK_SIZE, model_digest=self.model_digest
                    ),
                    max_model_len=MAX_LEN,
                    progress=common_pb2.EngineProgress(num_steps=1),
                    pairs=self.pairs,
                    local_prefill=self.local_prefill,
                    vocab_size=512,
                    step_model=self.step_model.to_proto(),
                    max_batched_tokens=64,
                    num_pending_prefill_tokens=self.num_pending_tokens
                    if self.behaviour.tells_pending
                    else 0,
                )
            await asyncio.sleep(self.watch_gap_s)


@dataclass(eq=False)
class FakeLease:
    start: prefill_pb2.PrefillStart
    grants: list[prefill_pb2.Grant] = field(default_factory=list)
    num_pending_tokens: int = 0  # accepted, and not computed


class FakePrefill(FakeWorker, prefill_pb2_grpc.PrefillServicer):
    """A prefill worker; ``leases`` are the open streams."""

    role = worker_pb2.WORKER_ROLE_PREFILL

    def __init__(self) -> None:
        super().__init__()
        self.leases: set[FakeLease] = set()
        self.num_heartbeats = 0
        self.num_released = 0  # leases that the router ended by half-closing
        self.traceparents: list[str] = []
        self.accepts_as: str | None = None  # an incarnation that is not its own

    @property
    def num_pending_tokens(self) -> int:
        return sum(lease.num_pending_tokens for lease in self.leases)

    def add_services(self, server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServicer_to_server(self, server)

    async def Prefill(
        self, request_iterator: AsyncIterator[prefill_pb2.PrefillCommand], context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        first = await anext(request_iterator, None)
        if first is None:  # the router left before it had said anything
            return
        lease = FakeLease(first.start)
        metadata = dict(context.invocation_metadata() or ())
        self.traceparents.append(str(metadata.get("traceparent", "")))
        self.request_ids.append(lease.start.request_id)
        self.specs.append(lease.start.spec)
        if self.behaviour.refuse is not None:
            raise self.behaviour.refuse
        self.leases.add(lease)
        events: asyncio.Queue[prefill_pb2.PrefillEvent] = asyncio.Queue()
        try:
            async with asyncio.TaskGroup() as tasks:
                work = tasks.create_task(self._prefill(lease, events))
                writer = tasks.create_task(self._write(events, context))
                async for command in request_iterator:
                    if command.HasField("heartbeat"):
                        self.num_heartbeats += 1
                    if command.HasField("grant"):
                        lease.grants.append(command.grant)
                        granted = prefill_pb2.Granted(grant_id=command.grant.grant_id)
                        events.put_nowait(prefill_pb2.PrefillEvent(granted=granted))
                self.num_released += 1
                work.cancel()
                writer.cancel()
        finally:
            self.leases.discard(lease)
        return
        yield

    async def _prefill(
        self, lease: FakeLease, events: asyncio.Queue[prefill_pb2.PrefillEvent]
    ) -> None:
        if not self.behaviour.accepts:
            return
        spec = lease.start.spec
        accepted = prefill_pb2.PrefillAccepted(
            incarnation=self.accepts_as or self.incarnation, num_cached_tokens=NUM_CACHED_TOKENS
        )
        lease.num_pending_tokens = max(0, len(spec.token_ids) - NUM_CACHED_TOKENS)
        events.put_nowait(prefill_pb2.PrefillEvent(accepted=accepted))
        await asyncio.sleep(self.behaviour.first_token_s)
        lease.num_pending_tokens = 0
        if self.behaviour.tells_prompts:
            for told in _told(lease.start):
                events.put_nowait(told)
        position = len(spec.token_ids)
        num_output = position - spec.num_prompt_tokens + 1
        events.put_nowait(
            prefill_pb2.PrefillEvent(
                first_token=prefill_pb2.FirstToken(
                    token_id=token_at(position),
                    position=position,
                    finish_reason=_finish_reason(spec, num_output, token_at(position)),
                    logprobs=_likely(token_at(position), spec.sampling.logprobs)
                    if spec.sampling.HasField("logprobs")
                    else None,
                )
            )
        )

    async def _write(
        self, events: asyncio.Queue[prefill_pb2.PrefillEvent], context: Context
    ) -> None:
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    event = await events.get()
            except TimeoutError:
                heartbeat = common_pb2.Heartbeat(progress=self.progress())
                event = prefill_pb2.PrefillEvent(heartbeat=heartbeat)
            if not self.behaviour.silent:
                await context.write(event)


@dataclass(eq=False)
class FakeReservation:
    reserve: decode_pb2.Reserve
    binds: list[decode_pb2.Bind] = field(default_factory=list)
    start: decode_pb2.Start | None = None
    token_ids: list[int] = field(default_factory=list)


class FakeDecode(FakeWorker, decode_pb2_grpc.DecodeServicer):
    """A decode worker; ``reservations`` are the sequences it holds, by id."""

    role = worker_pb2.WORKER_ROLE_DECODE

    def __init__(self) -> None:
        super().__init__()
        self.reservations: dict[int, FakeReservation] = {}
        self.peers: list[decode_pb2.Peer] = []
        self.ended_reservations: list[FakeReservation] = []
        self.num_released = 0  # reservations that the router gave back
        self.num_proven = 0  # pulls that the router was told of
        self._events: asyncio.Queue[decode_pb2.DecodeEvent] = asyncio.Queue()

    def add_services(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(self, server)

    async def Decode(
        self, request_iterator: AsyncIterator[decode_pb2.DecodeCommand], context: Context
    ) -> AsyncIterator[decode_pb2.DecodeEvent]:
        hello = await anext(request_iterator)
        assert hello.HasField("hello")
        self._events = asyncio.Queue()
        welcome = decode_pb2.Welcome(incarnation=self.incarnation)
        self._events.put_nowait(decode_pb2.DecodeEvent(welcome=welcome))
        try:
            async with asyncio.TaskGroup() as tasks:
                others = [
                    tasks.create_task(self._write(context)),
                    tasks.create_task(self._step()),
                ]
                async for command in request_iterator:
                    pull = self._handle(command)
                    if pull is not None:
                        others.append(tasks.create_task(pull))
                for other in others:
                    other.cancel()
        finally:
            self.reservations.clear()
        return
        yield

    def _handle(self, command: decode_pb2.DecodeCommand) -> Coroutine[Any, Any, None] | None:
        kind = command.WhichOneof("command")
        if kind == "peers":
            self.peers = list(command.peers.peers)
            self.pairs = [
                worker_pb2.Pair(
                    source_address=peer.address,
                    source_incarnation=peer.incarnation,
                    state=worker_pb2.PAIR_STATE_PROVEN,
                )
                for peer in self.peers
            ]
        elif kind == "reserve":
            self._reserve(command.reserve)
        elif kind == "bind":
            held = self.reservations.get(command.bind.sequence_id)
            if held is not None:
                held.binds.append(command.bind)
                return self._pull(command.bind)
        elif kind == "start":
            held = self.reservations.get(command.start.sequence_id)
            if held is not None:
                held.start = command.start
                held.token_ids.extend(command.start.emitted_token_ids)
        elif kind == "release" and command.release.sequence_id in self.reservations:
            self.num_released += 1
            self._end(decode_pb2.Ended(sequence_id=command.release.sequence_id))
        return None

    def _reserve(self, reserve: decode_pb2.Reserve) -> None:
        self.request_ids.append(reserve.request_id)
        self.specs.append(reserve.spec)
        if self.behaviour.refuse is not None:
            failure = to_failure(self.behaviour.refuse)
            ended = decode_pb2.Ended(sequence_id=reserve.sequence_id, failure=failure)
            self._events.put_nowait(decode_pb2.DecodeEvent(ended=ended))
            return
        held = FakeReservation(reserve, token_ids=list(reserve.spec.token_ids))
        self.reservations[reserve.sequence_id] = held
        if self.behaviour.accepts:
            reserved = decode_pb2.Reserved(sequence_id=reserve.sequence_id)
            self._events.put_nowait(decode_pb2.DecodeEvent(reserved=reserved))

    async def _pull(self, bind: decode_pb2.Bind) -> None:
        await asyncio.sleep(self.behaviour.pull_s)
        if self.behaviour.pull_failures > 0:
            self.behaviour.pull_failures -= 1
            failed = decode_pb2.PullFailed(
                sequence_id=bind.sequence_id,
                bind_id=bind.bind_id,
                reason=decode_pb2.PullFailure.Name(self.behaviour.pull_failure),
            )
            self._events.put_nowait(decode_pb2.DecodeEvent(pull_failed=failed))
            return
        proven = decode_pb2.Proven(
            sequence_id=bind.sequence_id,
            bind_id=bind.bind_id,
            stats=common_pb2.TransferStats(transport="inline", num_bytes=1000, total_s=0.001),
        )
        self._events.put_nowait(decode_pb2.DecodeEvent(proven=proven))

    async def _step(self) -> None:
        while True:
            await asyncio.sleep(self.behaviour.step_s)
            if self.behaviour.stalled:
                continue
            step = decode_pb2.StepTokens()
            for sequence_id, held in self.reservations.items():
                if held.start is not None:
                    self._run(sequence_id, held, step)
            if step.sequences:
                self._events.put_nowait(decode_pb2.DecodeEvent(step=step))
            for tokens in step.sequences:
                held = self.reservations[tokens.sequence_id]
                spec = held.reserve.spec
                num_output = len(held.token_ids) - spec.num_prompt_tokens
                reason = _finish_reason(spec, num_output, held.token_ids[-1])
                if reason:
                    ended = decode_pb2.Ended(
                        sequence_id=tokens.sequence_id,
                        finish_reason=reason,
                        num_preemptions=1,
                        num_computed_prompt_tokens=2,
                    )
                    self._end(ended)

    def _run(self, sequence_id: int, held: FakeReservation, step: decode_pb2.StepTokens) -> None:
        spec, sampling = held.reserve.spec, held.reserve.spec.sampling
        position = len(held.token_ids)
        num_output = position - spec.num_prompt_tokens
        num_new = min(sampling.max_tokens - num_output, self.behaviour.tokens_per_step)
        new = [token_at(position + i) for i in range(num_new)]
        if sampling.stop_token_ids:
            ends = (_finish_reason(spec, num_output + i + 1, new[i]) for i in range(num_new))
            new = new[: next((i + 1 for i, reason in enumerate(ends) if reason), num_new)]
        held.token_ids.extend(new)
        logprobs = []
        if sampling.HasField("logprobs"):
            logprobs = [_likely(token_id, sampling.logprobs) for token_id in new]
        step.sequences.add(
            sequence_id=sequence_id, position=position, token_ids=new, logprobs=logprobs
        )

    def _end(self, ended: decode_pb2.Ended) -> None:
        self.ended_reservations.append(self.reservations.pop(ended.sequence_id))
        self._events.put_nowait(decode_pb2.DecodeEvent(ended=ended))

    def fail_all(self) -> None:
        """Every sequence fails by itself."""
        failure = to_failure(NoWorkerError("engine error"))
        for sequence_id in list(self.reservations):
            self._end(decode_pb2.Ended(sequence_id=sequence_id, failure=failure))

    async def _write(self, context: Context) -> None:
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    event = await self._events.get()
            except TimeoutError:
                heartbeat = common_pb2.Heartbeat(progress=self.progress())
                event = decode_pb2.DecodeEvent(heartbeat=heartbeat)
            if not self.behaviour.silent:
                await context.write(event)
                self.num_proven += event.HasField("proven")


def _finish_reason(
    spec: common_pb2.SequenceSpec, num_output: int, token_id: int
) -> common_pb2.FinishReason:
    is_free = num_output >= spec.sampling.min_tokens
    if is_free and token_id in spec.sampling.stop_token_ids:
        return common_pb2.FINISH_REASON_STOP
    if num_output >= spec.sampling.max_tokens:
        return common_pb2.FINISH_REASON_LENGTH
    return common_pb2.FINISH_REASON_UNSPECIFIED


def _likely(token_id: int, num_top: int) -> common_pb2.TokenLogprobs:
    """Each token is the likeliest, and the ones behind it follow."""
    top = range(token_id, token_id + num_top)
    return common_pb2.TokenLogprobs(
        logprob=-1.0, top_token_ids=top, top_logprobs=[-1.0 - i for i in range(num_top)]
    )


def _told(start: prefill_pb2.PrefillStart) -> Iterator[prefill_pb2.PrefillEvent]:
    """What is wanted of the prompt, in one part."""
    kind = start.report.WhichOneof("kind")
    if kind == "pooling":
        pooled = prefill_pb2.PooledStates(values=POOLED)
        yield prefill_pb2.PrefillEvent(pooled=pooled)
    elif kind == "logprobs":
        wanted = start.report.logprobs
        asked = start.spec.token_ids[wanted.first_position : wanted.end_position]
        part = common_pb2.PromptLogprobs(
            position=wanted.first_position,
            logprobs=[_likely(token_id, wanted.num_top) for token_id in asked],
        )
        yield prefill_pb2.PrefillEvent(prompt_logprobs=part)

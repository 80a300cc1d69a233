"""One client call: runs the request's state machine and writes what it emits.

Thin shell: everything that happens becomes one call of the machine, whose actions
are executed at once, without awaiting. Only writing to the client waits, so a slow
client delays nobody else.
"""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from typing import Any

from diptych.block_hash import block_keys
from diptych.errors import DiptychError, NoWorkerError, SlowClientError
from diptych.telemetry import tracing
from diptych.v1 import common_pb2, decode_pb2, inference_pb2, prefill_pb2
from router import actions
from router.actions import Action
from router.answer import Answer
from router.cluster import Cluster
from router.config import RouterConfig
from router.decode_link import DecodeLink
from router.observation import RequestObserver
from router.placement import Placement, Policy, Query, WorkerId
from router.prefill_link import LeaseStream
from router.request import RequestMachine, RequestState
from router.surroundings import Surroundings
from router.validation import ResolvedRequest
from router.waiting_room import WaitingRoom

logger = logging.getLogger(__name__)

Write = Callable[[inference_pb2.GenerateResponse], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What all sessions of a router share."""

    config: RouterConfig
    cluster: Cluster
    policy: Policy
    room: WaitingRoom
    incarnation: str
    sequence_ids: Iterator[int]
    spawn: Callable[[Coroutine[Any, Any, None], str], None]  # a task that outlives the session


class Session:
    """Drives one request from its placement on. Owned by its handler's task.

    ``run`` writes until the request is over. All other methods are synchronous
    and called on the event loop, also while ``run`` waits for the client.
    """

    def __init__(
        self,
        request_id: str,
        request: ResolvedRequest,
        answer: Answer,
        observer: RequestObserver,
        services: Services,
        *,
        deadline_s: float | None,
    ) -> None:
        self._request_id = request_id
        self._request = request
        self._answer = answer
        self._observer = observer
        self._services = services
        self._config = services.config
        self._loop = asyncio.get_running_loop()
        self._keys: tuple[bytes, ...] | None = None
        self._block_size = 0
        self._streams: dict[int, LeaseStream] = {}
        self._links: dict[int, DecodeLink] = {}
        self._seat_workers: dict[int, WorkerId] = {}
        self._metadata = tracing.inject_metadata(observer.context)
        self._trace_context = tracing.inject_map(observer.context)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s: float | None = None
        self._wake = asyncio.Event()
        self._writing: asyncio.Timeout | None = None  # around a write that may take long
        self._actions: deque[Action] = deque()
        self._is_executing = False
        self._finish_reason = 0
        self._error: DiptychError | None = None
        self._bug: Exception | None = None
        around = Surroundings(
            clock=self._loop.time,
            place=self._place,
            new_sequence_id=lambda: next(services.sequence_ids),
            new_ticket=lambda: secrets.token_bytes(16),
            timers=self._config.timers,
            max_attempts=self._config.max_attempts,
            allow_recompute=self._config.allow_recompute,
        )
        self._machine = RequestMachine(request.shape, around, answer.sink, deadline_s=deadline_s)

    async def run(self, write: Write) -> inference_pb2.GenerateResponse:
        """Write the answer but its last response, which is returned.

        Raises DiptychError; cancelling frees everything at once.
        """
        try:
            self._handle(self._machine.begin)
            while True:
                await self._wake.wait()
                self._wake.clear()
                if not await self._write_unsent(write):
                    break
            if self._bug is not None:
                raise self._bug
            if self._error is not None:
                raise self._error
            return self._last_response()
        finally:
            self._handle(self._machine.cancel)
            if self._timer is not None:
                self._timer.cancel()
            self._services.room.leave(self)
            self._loop.call_soon(self._services.room.pump)

    @property
    def usage(self) -> inference_pb2.Usage:
        """So far."""
        return inference_pb2.Usage(
            num_prompt_tokens=len(self._request.shape.prompt_ids),
            num_output_tokens=self._answer.num_output_tokens,
            num_cached_tokens=self._machine.num_cached_tokens or 0,
        )

    @property
    def timing(self) -> inference_pb2.Timing:
        """So far."""
        machine, timing = self._machine, self._answer.timing()
        attempt = machine.attempt
        timing.kv_path = inference_pb2.KVPath.Name(attempt.kv_path)  # type: ignore[assignment]
        timing.num_attempts = machine.num_attempts
        timing.num_preemptions = machine.num_preemptions
        timing.prefill_worker = attempt.prefill_worker
        timing.decode_worker = attempt.decode_worker
        if attempt.transfer is not None:
            timing.transfer.CopyFrom(attempt.transfer)
        return timing

    @property
    def finish_reason(self) -> int:
        """0 unless it finished."""
        return self._finish_reason

    def try_place(self) -> bool:
        """See :class:`router.waiting_room.Waiter`."""
        self._handle(self._machine.try_place)
        return self._machine.state is not RequestState.QUEUED

    # What the workers say

    def on_prefill_event(self, sequence_id: int, event: prefill_pb2.PrefillEvent) -> None:
        """See :class:`router.prefill_link.LeaseListener`."""
        machine, kind = self._machine, event.WhichOneof("event")
        if kind == "accepted":
            cached = event.accepted.num_cached_tokens
            self._handle(lambda: machine.accepted(sequence_id, cached))
        elif kind == "first_token":
            first = event.first_token
            margin = first.margin if first.HasField("margin") else None
            self._services.cluster.prefill_pool.computed(sequence_id)
            self._handle(
                lambda: machine.first_token(
                    sequence_id, first.token_id, first.position, margin, first.finish_reason
                )
            )
        elif kind == "granted":
            grant_id = event.granted.grant_id
            self._handle(lambda: machine.granted(sequence_id, grant_id))

    def on_lease_ended(self, sequence_id: int, error: DiptychError) -> None:
        """See :class:`router.prefill_link.LeaseListener`."""
        self._forget_lease(sequence_id)
        self._handle(lambda: self._machine.lease_ended(sequence_id, error))

    def on_tokens(self, tokens: decode_pb2.SequenceTokens) -> None:
        """See :class:`router.decode_link.SeatListener`."""
        self._handle(
            lambda: self._machine.tokens(
                tokens.sequence_id, tokens.position, tokens.token_ids, tokens.margins
            )
        )

    def on_decode_event(self, event: decode_pb2.DecodeEvent) -> None:
        """See :class:`router.decode_link.SeatListener`."""
        machine, kind = self._machine, event.WhichOneof("event")
        if kind == "reserved":
            reserved = event.reserved
            self._handle(lambda: machine.reserved(reserved.sequence_id, reserved.num_cached_tokens))
        elif kind == "proven":
            proven = event.proven
            self._handle(lambda: machine.proven(proven.sequence_id, proven.bind_id, proven.stats))
        elif kind == "pull_failed":
            failed = event.pull_failed
            self._handle(
                lambda: machine.pull_failed(
                    failed.sequence_id, failed.bind_id, failed.reason, failed.message
                )
            )
        elif kind == "ended":
            self._links.pop(event.ended.sequence_id, None)
            self._handle(lambda: machine.ended(event.ended))

    def on_seat_lost(self, sequence_id: int, message: str) -> None:
        """See :class:`router.decode_link.SeatListener`."""
        self._links.pop(sequence_id, None)
        self._handle(lambda: self._machine.seat_lost(sequence_id, message))

    # Shell of the machine

    def _handle(self, step: Callable[[], list[Action]]) -> None:
        """Let the machine take one step and do what it says; a bug ends this request only."""
        if self._bug is not None:
            return
        try:
            self._actions.extend(step())
            if self._answer.is_overfull:
                self._actions.extend(self._machine.fail(_too_slow(self._config)))
            if self._is_executing:  # the outer call goes on with them
                return
            self._is_executing = True
            try:
                while self._actions:
                    self._execute(self._actions.popleft())
            finally:
                self._is_executing = False
            self._arm_timer()
        except Exception as bug:  # noqa: BLE001 - the boundary between requests
            self._crash(bug)
        if self._answer.has_unsent:
            self._wake.set()

    def _crash(self, bug: Exception) -> None:
        if self._bug is None:
            logger.error("request crashed", exc_info=bug, extra={"request": self._request_id})
            self._bug = bug
        self._actions.clear()
        for sequence_id in list(self._streams):
            self._close_lease(sequence_id)
        for sequence_id in list(self._links):
            self._release(sequence_id)
        self._services.room.leave(self)
        self._wake.set()

    def _execute(self, action: Action) -> None:
        match action:
            case actions.OpenLease():
                self._open_lease(action)
            case actions.Grant():
                self._grant(action)
            case actions.CloseLease():
                self._close_lease(action.sequence_id)
            case actions.Reserve():
                self._reserve(action)
            case actions.Bind():
                self._bind(action)
            case actions.Start():
                self._start(action)
            case actions.Release():
                self._release(action.sequence_id)
            case actions.RunLocally():
                self._observer.ran_locally(action.why)
            case actions.Retried():
                self._observer.retried(action.retry, action.cause)
            case actions.Enqueue():
                self._enqueue(action.front)
            case actions.Dequeue():
                self._services.room.stop_waiting(self)
            case actions.Pump():
                self._services.room.pump()
            case actions.Finish():
                self._finish_reason = action.reason
                self._end()
            case actions.Fail():
                self._error = action.error
                self._observer.failed(action.error)
                if self._writing is not None:
                    self._writing.reschedule(self._loop.time())
                self._end()

    def _end(self) -> None:
        self._answer.moments.ended_s = time.monotonic()
        self._services.room.leave(self)
        self._loop.call_soon(self._services.room.pump)
        self._wake.set()

    def _enqueue(self, front: bool) -> None:
        try:
            self._services.room.enter(self, front=front)
        except DiptychError as error:
            self._actions.extend(self._machine.fail(error))

    def _place(self, query: Query) -> Placement | None:
        cluster = self._services.cluster
        if self._keys is None:
            self._block_size = cluster.block_size()
            self._keys = tuple(
                block_keys(
                    self._request.shape.prompt_ids, self._block_size, self._request.cache_salt
                )
            )
        query = replace(query, block_keys=self._keys, block_size=self._block_size)
        return self._services.policy.place(query, cluster.snapshot())

    def _open_lease(self, action: actions.OpenLease) -> None:
        self._answer.placed()
        watch = self._services.cluster.prefill_watch(action.worker)
        sequence_id = action.sequence_id
        if watch is None:
            gone = NoWorkerError("it is gone")
            self._actions.extend(self._machine.lease_ended(sequence_id, gone))
            return
        start = prefill_pb2.PrefillStart(
            router_incarnation=self._services.incarnation,
            sequence_id=sequence_id,
            request_id=self._request_id,
            spec=self._spec(action.num_emitted),
        )
        stream = LeaseStream(
            watch.channel, start, self, timers=self._config.timers, metadata=self._metadata
        )
        self._streams[sequence_id] = stream
        num_tokens = len(start.spec.token_ids)
        self._services.cluster.prefill_pool.opened(sequence_id, action.worker, num_tokens)
        if self._keys:
            self._services.policy.remember(action.worker, self._keys)
        self._services.spawn(stream.run(), f"lease {sequence_id}")

    def _grant(self, action: actions.Grant) -> None:
        stream = self._streams.get(action.sequence_id)
        if stream is not None:
            stream.grant(
                prefill_pb2.Grant(
                    grant_id=action.grant_id,
                    ticket=action.ticket,
                    reader_incarnation=action.reader.incarnation,
                )
            )

    def _close_lease(self, sequence_id: int) -> None:
        stream = self._streams.get(sequence_id)
        self._forget_lease(sequence_id)
        if stream is not None:
            stream.close()

    def _forget_lease(self, sequence_id: int) -> None:
        self._streams.pop(sequence_id, None)
        self._services.cluster.prefill_pool.computed(sequence_id)

    def _reserve(self, action: actions.Reserve) -> None:
        self._answer.placed()
        link = self._services.cluster.decode_link(action.worker)
        reserve = decode_pb2.Reserve(
            sequence_id=action.sequence_id,
            request_id=self._request_id,
            spec=self._spec(action.num_emitted),
            trace_context=self._trace_context,
        )
        if link is None or not link.reserve(reserve, self):
            self._actions.extend(self._machine.seat_lost(action.sequence_id, "it is gone"))
            return
        self._links[action.sequence_id] = link
        self._seat_workers[action.sequence_id] = action.worker

    def _bind(self, action: actions.Bind) -> None:
        link = self._links.get(action.sequence_id)
        if link is not None:
            link.bind(
                decode_pb2.Bind(
                    sequence_id=action.sequence_id,
                    bind_id=action.bind_id,
                    source_address=action.source.address,
                    source_incarnation=action.source.incarnation,
                    ticket=action.ticket,
                    first_missing_token=action.first_missing_token,
                )
            )

    def _start(self, action: actions.Start) -> None:
        link = self._links.get(action.sequence_id)
        if link is None:
            return
        if self._keys:
            self._services.policy.remember(self._seat_workers[action.sequence_id], self._keys)
        link.start(
            decode_pb2.Start(
                sequence_id=action.sequence_id,
                emitted_token_ids=action.emitted,
                compute_missing=action.compute_missing,
            )
        )

    def _release(self, sequence_id: int) -> None:
        link = self._links.pop(sequence_id, None)
        if link is not None:
            link.release(sequence_id)

    def _spec(self, num_emitted: int) -> common_pb2.SequenceSpec:
        shape = self._request.shape
        emitted = self._machine.emitted[:num_emitted]
        return common_pb2.SequenceSpec(
            token_ids=[*shape.prompt_ids, *emitted],
            num_prompt_tokens=len(shape.prompt_ids),
            sampling=self._request.sampling,
            cache_salt=self._request.cache_salt,
        )

    def _arm_timer(self) -> None:
        wake_at_s = self._machine.wake_at_s
        if wake_at_s == self._timer_at_s:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at_s = wake_at_s
        if wake_at_s is not None:
            self._timer = self._loop.call_at(wake_at_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer_at_s = None
        self._handle(self._machine.tick)

    # Writing

    async def _write_unsent(self, write: Write) -> bool:
        """Write what there is; False once nothing more will come."""
        while (response := self._answer.take()) is not None:
            if self._error is not None:  # nobody reads, or nobody waits for it any more
                return False
            try:
                async with asyncio.timeout(None) as self._writing:
                    await write(response)
            except TimeoutError:
                return False
            finally:
                self._writing = None
            num_tokens = len(response.token_ids)
            self._observer.written(num_tokens, self._answer.written(num_tokens))
        return not (self._finish_reason or self._error or self._bug)

    def _last_response(self) -> inference_pb2.GenerateResponse:
        text = self._answer.flush()
        if self._answer.stop_match:
            self._finish_reason = common_pb2.FINISH_REASON_STOP
        return self._answer.last_response(self._finish_reason, text, self.usage, self.timing)


def _too_slow(config: RouterConfig) -> SlowClientError:
    return SlowClientError(
        f"the client left {config.client_buffer_messages} responses unread",
        client_buffer_messages=str(config.client_buffer_messages),
    )

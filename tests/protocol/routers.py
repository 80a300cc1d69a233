"""A simulated router: production request machines, and streams that carry out their actions."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from google.protobuf.message import Message

from diptych.block_hash import block_keys
from diptych.errors import DiptychError, NoWorkerError
from diptych.v1 import common_pb2, decode_pb2, prefill_pb2
from router.placement.cache_index import CacheIndex
from router.placement.least_loaded import LeastLoaded
from router.placement.placement import Placement
from router.placement.query import Query
from router.placement.views import DecodeView, PrefillView, Snapshot, WorkerId
from router.placement.waiting_room import WaitingRoom
from router.request import actions, events, worker_messages
from router.request.actions import Action
from router.request.deps import RequestDeps
from router.request.emitted_tokens import RequestShape
from router.request.events import Event
from router.request.machine import RequestMachine
from tests.protocol.decodes import DecodeSide, DecodeWorker
from tests.protocol.fake_model import STOP_TOKEN, answer
from tests.protocol.invariants import Invariant
from tests.protocol.prefills import LeaseSide
from tests.protocol.wire import Stream
from tests.protocol.workers import BLOCK_SIZE, MAX_LEN, TIMERS, Worker

if TYPE_CHECKING:
    from tests.protocol.cluster import Cluster


@dataclass(frozen=True)
class Question:
    """What one client asks."""

    prompt: tuple[int, ...]
    max_tokens: int
    deadline_s: float | None = None
    stop_at: int | None = None  # a stop string that only the router sees, after so many tokens


@dataclass(eq=False)
class LeaseLink:
    """The client's side of one Prefill stream (router.cluster.prefill_link)."""

    request: "Request"
    sequence_id: int
    worker: WorkerId
    stream: Stream | None = None

    def on_message(self, message: Message) -> None:
        assert isinstance(message, prefill_pb2.PrefillEvent)
        if message.HasField("accepted"):
            incarnation = message.accepted.incarnation
            if incarnation != self.worker.incarnation:
                self._over(NoWorkerError(f"{incarnation} is there now"))
                return
        self.request.on_prefill_event(self.sequence_id, message)

    def on_end(self, error: DiptychError | None) -> None:
        self._over(error or NoWorkerError("the worker ended the lease"))

    def close(self) -> None:
        assert self.stream is not None
        self.stream.client_closes()

    def _over(self, error: DiptychError) -> None:
        self.close()
        self.request.on_lease_ended(self.sequence_id, error)


@dataclass(eq=False)
class DecodeLink:
    """The client's side of one Decode stream (router.cluster.decode_link)."""

    router: "Router"
    worker: DecodeWorker
    is_up: bool = False
    stream: Stream | None = None
    requests: dict[int, "Request"] = field(default_factory=dict)

    def send(self, command: decode_pb2.DecodeCommand) -> None:
        assert self.stream is not None
        self.stream.up.put(command)

    def on_message(self, message: Message) -> None:
        assert isinstance(message, decode_pb2.DecodeEvent)
        kind = message.WhichOneof("event")
        if kind == "welcome":
            self.is_up = True
        elif kind == "step":
            for tokens in message.step.sequences:
                if tokens.sequence_id in self.requests:
                    self.requests[tokens.sequence_id].on_tokens(tokens)
        elif kind is not None:
            sequence_id = getattr(message, kind).sequence_id
            request = self.requests.get(sequence_id)
            if kind == "ended":
                self.requests.pop(sequence_id, None)
            if request is not None:
                request.on_decode_event(message)

    def on_end(self, error: DiptychError | None) -> None:
        self.is_up = False
        assert self.stream is not None
        self.stream.client_closes()
        del self.router.links[self.worker.identity]
        requests, self.requests = self.requests, {}
        for sequence_id, request in requests.items():
            request.on_reservation_lost(sequence_id)


class Router:
    """One router process."""

    def __init__(self, cluster: "Cluster", incarnation: str) -> None:
        self.cluster = cluster
        self.incarnation = incarnation
        self.alive = True
        self.requests: list[Request] = []
        self.links: dict[WorkerId, DecodeLink] = {}
        self.known: set[WorkerId] = set()  # prefill workers, as Watch told
        self.pumps_due: list[Callable[[], None]] = []  # events of the cluster
        self.room = WaitingRoom(
            max_waiting=100,
            max_placed=100,
            schedule=self.pumps_due.append,
            schedule_rest=lambda after_s, pump: None,
        )
        self.sequence_ids = count(1)
        self.policy = LeastLoaded(
            CacheIndex(64),
            local_below_tokens=BLOCK_SIZE,
            allow_local=True,
            allow_recompute=True,
        )

    def snapshot(self) -> Snapshot:
        prefills = tuple(
            PrefillView(worker=worker, num_pending_tokens=0, max_model_len=MAX_LEN)
            for worker in sorted(self.known)
        )
        decodes = tuple(
            DecodeView(
                worker=link.worker.identity,
                num_sequences=len(link.requests),
                max_model_len=MAX_LEN,
                local_prefill=True,
                proven=frozenset(w.incarnation for w in link.worker.connected),
            )
            for _, link in sorted(self.links.items())
            if link.is_up
        )
        return Snapshot(prefills, decodes)

    def ask(self, question: Question) -> "Request":
        request = Request(self, question)
        self.requests.append(request)
        request.handle(events.Begin())
        return request

    def watch(self) -> None:
        """Watch streams tell which workers there are, and what they have cached."""
        self.known = {worker.identity for worker in self.cluster.prefills}
        for worker in (*self.cluster.prefills, *self.cluster.decodes):
            self._tell_cache(worker)
        for worker in self.cluster.decodes:
            if worker.identity not in self.links:
                self._connect(worker)
        self.pump()

    def tick(self) -> None:
        for request in self.requests:
            due = request.machine.wake_at_s
            if due is not None and self.cluster.now >= due:
                request.handle(events.Tick())
        self.pump()

    def pump(self) -> None:
        """Offer placements now, whether or not that was due."""
        self.pumps_due.clear()
        self.room.pump()

    def _tell_cache(self, worker: Worker) -> None:
        cache, incarnation = self.policy.cache, worker.identity.incarnation
        seq = cache.seq(incarnation)
        if seq == worker.pool.cache_log.seq:
            return  # nothing has changed
        for change in worker.pool.cache_log.since(seq):
            assert cache.told(incarnation, change)

    def _connect(self, worker: DecodeWorker) -> None:
        link = self.links[worker.identity] = DecodeLink(self, worker)
        side = DecodeSide(worker)
        link.stream = side.stream = self.cluster.connect("decode", link, self, side, worker)
        hello = decode_pb2.Hello(router_incarnation=self.incarnation)
        link.send(decode_pb2.DecodeCommand(hello=hello))


class Request:
    """One client call (router.request.session and router.request.dispatch)."""

    def __init__(self, router: Router, question: Question) -> None:
        self.router = router
        self.question = question
        self.right, self.right_reason = answer(question.prompt, question.max_tokens)
        self.emitted: list[int] = []
        self.outcome: int | DiptychError | None = None
        self.cancelled = False
        self.leases: dict[int, LeaseLink] = {}
        self.reservations: dict[int, DecodeLink] = {}
        cluster = router.cluster
        deps = RequestDeps(
            clock=lambda: cluster.now,
            place=self._place,
            has_workers=lambda: bool(router.known and router.links),
            queue_ends_in_s=lambda: 1.0,
            new_sequence_id=lambda: next(router.sequence_ids),
            new_ticket=cluster.new_ticket,
            timers=TIMERS,
            max_attempts=3,
        )
        shape = RequestShape(
            prompt_ids=question.prompt,
            max_tokens=question.max_tokens,
            stop_token_ids=frozenset({STOP_TOKEN}),
        )
        self._keys = tuple(block_keys(question.prompt, BLOCK_SIZE))
        deadline_s = None if question.deadline_s is None else cluster.now + question.deadline_s
        self.machine = RequestMachine(shape, deps, self._sink, deadline_s=deadline_s)

    @property
    def is_over(self) -> bool:
        return self.outcome is not None or self.cancelled

    def cancel(self) -> None:
        self.cancelled = True
        self.handle(events.Cancelled())
        self.router.room.leave(self)

    def offer(self, *, room_made: bool) -> None:
        self.handle(events.Offered(room_made))

    def may_be_local(self) -> bool:
        return True

    def may_come(self) -> bool:
        return True

    def turn_away(self, error: DiptychError) -> None:
        self.handle(events.TurnedAway(error))

    def handle(self, event: Event | None) -> None:
        happened = deque([] if event is None else [event])
        while happened:
            for action in self.machine.handle(happened.popleft()):
                caused = self._execute(action)
                if caused is not None:
                    happened.append(caused)

    def on_prefill_event(self, sequence_id: int, event: prefill_pb2.PrefillEvent) -> None:
        self.handle(worker_messages.prefill_event(sequence_id, event))

    def on_lease_ended(self, sequence_id: int, error: DiptychError) -> None:
        self.leases.pop(sequence_id, None)
        self.handle(events.LeaseEnded(sequence_id, error))

    def on_tokens(self, tokens: decode_pb2.SequenceTokens) -> None:
        self.handle(worker_messages.tokens(tokens))

    def on_decode_event(self, event: decode_pb2.DecodeEvent) -> None:
        if event.HasField("ended"):
            self.reservations.pop(event.ended.sequence_id, None)
        self.handle(worker_messages.decode_event(event))

    def on_reservation_lost(self, sequence_id: int) -> None:
        self.reservations.pop(sequence_id, None)
        self.handle(events.ReservationLost(sequence_id, "the stream broke"))

    def _place(self, query: Query) -> Placement | None:
        query = query._replace(block_keys=self._keys, block_size=BLOCK_SIZE)
        return self.router.policy.place(query, self.router.snapshot())

    def _sink(self, token_ids: Sequence[int], margins: object, logprobs: object) -> bool:
        watch = self.router.cluster.setting.watch
        if self.is_over:
            watch.broken(Invariant.OUTCOME, "a token after the end")
        self.emitted += token_ids
        if self.emitted != self.right[: len(self.emitted)]:
            watch.broken(Invariant.TOKENS, f"{self.emitted} were emitted, not {self.right}")
        stop_at = self.question.stop_at
        return stop_at is not None and len(self.emitted) >= stop_at

    def _execute(self, action: Action) -> Event | None:
        if self.is_over and not self.cancelled:
            self.router.cluster.setting.watch.broken(Invariant.OUTCOME, f"{action} after the end")
        match action:
            case actions.OpenLease():
                return self._open_lease(action)
            case actions.Grant():
                grant = worker_messages.grant(action)
                link = self.leases.get(action.sequence_id)
                if link is not None and link.stream is not None:
                    link.stream.up.put(prefill_pb2.PrefillCommand(grant=grant))
            case actions.CloseLease():
                link = self.leases.pop(action.sequence_id, None)
                if link is not None:
                    link.close()
            case actions.Reserve():
                return self._reserve(action)
            case actions.Bind():
                command = decode_pb2.DecodeCommand(bind=worker_messages.bind(action))
                self._send(action.sequence_id, command)
            case actions.Start():
                held = self.reservations.get(action.sequence_id)
                if held is not None:
                    cache, incarnation = self.router.policy.cache, held.worker.identity.incarnation
                    cache.expect(incarnation, self._keys)
                    cache.settle(incarnation, self._keys)
                command = decode_pb2.DecodeCommand(start=worker_messages.start(action))
                self._send(action.sequence_id, command)
            case actions.Release():
                release = decode_pb2.Release(sequence_id=action.sequence_id)
                self._send(action.sequence_id, decode_pb2.DecodeCommand(release=release))
                held = self.reservations.pop(action.sequence_id, None)
                if held is not None:
                    held.requests.pop(action.sequence_id, None)
            case actions.Enqueue():
                self.router.room.enter(self, front=action.front)
            case actions.Dequeue():
                room = self.router.room
                (room.take if action.is_placed else room.stop_waiting)(self)
            case actions.Pump():
                self.router.room.pump_soon()
            case actions.RunLocally() | actions.Retried():
                pass
            case actions.Finish():
                self._end(action.reason)
            case actions.Fail():
                self._end(action.error)
        return None

    def _end(self, outcome: int | DiptychError) -> None:
        if self.outcome is not None:
            self.router.cluster.setting.watch.broken(Invariant.OUTCOME, "two ends")
        self.outcome = outcome
        self.router.room.leave(self)

    def _spec(self, num_emitted: int) -> common_pb2.SequenceSpec:
        sampling = common_pb2.SamplingParams(
            temperature=0,
            seed=1,
            max_tokens=self.question.max_tokens,
            stop_token_ids=[STOP_TOKEN],
        )
        return common_pb2.SequenceSpec(
            token_ids=[*self.question.prompt, *self.emitted[:num_emitted]],
            num_prompt_tokens=len(self.question.prompt),
            sampling=sampling,
        )

    def _open_lease(self, action: actions.OpenLease) -> Event | None:
        if action.worker not in self.router.known:
            return events.LeaseEnded(action.sequence_id, NoWorkerError("it is gone"))
        cluster = self.router.cluster
        link = LeaseLink(self, action.sequence_id, action.worker)
        worker = cluster.prefill_at(action.worker.address)
        side = None if worker is None else LeaseSide(worker)
        link.stream = cluster.connect("prefill", link, self.router, side, worker)
        if side is not None:
            side.stream = link.stream
        self.leases[action.sequence_id] = link
        start = prefill_pb2.PrefillStart(
            router_incarnation=self.router.incarnation,
            sequence_id=action.sequence_id,
            spec=self._spec(action.num_emitted),
        )
        link.stream.up.put(prefill_pb2.PrefillCommand(start=start))
        return None

    def _reserve(self, action: actions.Reserve) -> Event | None:
        link = self.router.links.get(action.worker)
        if link is None or not link.is_up:
            return events.ReservationLost(action.sequence_id, "it is gone")
        link.requests[action.sequence_id] = self
        self.reservations[action.sequence_id] = link
        reserve = decode_pb2.Reserve(
            sequence_id=action.sequence_id,
            spec=self._spec(action.num_emitted),
            to_pull=action.to_pull,
        )
        link.send(decode_pb2.DecodeCommand(reserve=reserve))
        return None

    def _send(self, sequence_id: int, command: decode_pb2.DecodeCommand) -> None:
        link = self.reservations.get(sequence_id)
        if link is not None:
            link.send(command)

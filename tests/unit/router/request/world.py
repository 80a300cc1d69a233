"""Workers on paper, which accept, refuse, repeat, lie and die, for one request's machine."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from diptych.errors import DiptychError, NoWorkerError
from diptych.rpc.status import to_failure
from diptych.timers import Timers
from diptych.v1 import common_pb2, decode_pb2
from router.placement.cache_index import CacheIndex
from router.placement.least_loaded import LeastLoaded
from router.placement.placement import Paired, Placement, Unreachable, Why
from router.placement.query import Query
from router.placement.views import DecodeView, PrefillView, Snapshot, WorkerId
from router.request import actions, events, worker_messages
from router.request.actions import Action
from router.request.deps import RequestDeps
from router.request.emitted_tokens import RequestShape
from router.request.events import Event
from router.request.machine import RequestMachine
from router.request.prompt_told import ToldSink, Wanted
from tests.told_caches import holds

PROMPT = (11, 12, 13, 14, 15)
KEYS = tuple(bytes([token]) * 16 for token in PROMPT)  # blocks of one token
STOP = common_pb2.FINISH_REASON_STOP
LENGTH = common_pb2.FINISH_REASON_LENGTH
TIMERS = Timers()
QUEUE_ENDS_IN_S = 7.5


def worker(name: str) -> WorkerId:
    return WorkerId(f"{name}:1", name)


def snapshot(
    prefills: tuple[str, ...], decodes: tuple[str, ...], *, local_prefill: bool = True
) -> Snapshot:
    return Snapshot(
        tuple(
            PrefillView(worker=worker(p), num_pending_tokens=0, max_model_len=100) for p in prefills
        ),
        tuple(
            DecodeView(
                worker=worker(d),
                num_sequences=0,
                max_model_len=100,
                local_prefill=local_prefill,
                proven=frozenset(prefills) - {d},
            )
            for d in decodes
        ),
    )


def decoded(ended: decode_pb2.Ended) -> Event:
    """The machine's event for it."""
    event = worker_messages.decode_event(decode_pb2.DecodeEvent(ended=ended))
    assert event is not None
    return event


def policy(*, allow_recompute: bool, local_below_tokens: int) -> LeastLoaded:
    return LeastLoaded(
        CacheIndex(64),
        local_below_tokens=local_below_tokens,
        allow_local=True,
        allow_recompute=allow_recompute,
    )


class World:
    """Executes a machine's actions on paper and answers for the workers."""

    def __init__(
        self,
        prefills: tuple[str, ...] = ("p1", "p2"),
        decodes: tuple[str, ...] = ("d1", "d2"),
        *,
        max_tokens: int = 4,
        stop_token_ids: frozenset[int] = frozenset(),
        deadline_s: float | None = None,
        max_attempts: int = 3,
        local_prefill: bool = True,
        allow_recompute: bool = True,
        stop_at: int | None = None,
        believed_cached: tuple[str, ...] = (),
        told: Wanted | None = None,
        prompt_sink: ToldSink = lambda part: None,
        foresee: Callable[[Query, bool], Unreachable | None] | None = None,
        first_token_due_s: float | None = None,
        resumed: Sequence[int] = (),
        draw: Callable[[], float] = lambda: 0.5,
        spare_only_s: float = 0.0,
        model_digest: str = "",
        in_order: bool = False,
        has_logprobs: bool = False,
        block_size: int = 1,
    ) -> None:
        """``believed_cached``: decode workers that placement takes to have the whole prompt.

        ``in_order``: of pairs one half is asked after the other.
        """
        self.in_order = in_order
        self.now = 100.0
        self.is_full = False  # everybody is busy with others
        self.served = "a"  # by all workers: a model's digest
        self.num_clock_calls = self.num_asked = 0
        self.asked: Query | None = None  # the newest that asked for a placement
        below = 2 if believed_cached else 0
        self.policy = policy(allow_recompute=allow_recompute, local_below_tokens=below)
        for name in believed_cached:
            holds(self.policy, worker(name), KEYS)
        self.prefills, self.decodes = list(prefills), list(decodes)
        self.local_prefill = local_prefill
        self.leases: dict[int, actions.OpenLease] = {}  # open as far as the worker knows
        self.reservations: dict[int, actions.Reserve] = {}
        self.grants: dict[int, actions.Grant] = {}
        self.binds: dict[int, actions.Bind] = {}
        self.started: dict[int, actions.Start] = {}
        self.emitted: list[int] = []
        self.retries: list[str] = []
        self.ran_locally: list[Why] = []
        self.queued = False
        self.outcome: int | DiptychError | None = None
        self.log: list[Action] = []
        self.stop_at = stop_at
        self.ids, self.tickets = itertools.count(1), itertools.count(1)
        self.machine = RequestMachine(
            RequestShape(
                prompt_ids=PROMPT,
                max_tokens=max_tokens,
                stop_token_ids=stop_token_ids,
                told=told,
                has_logprobs=has_logprobs,
            ),
            RequestDeps(
                clock=self.clock,
                place=lambda query: self.place(query),
                has_workers=lambda: bool(self.prefills and self.decodes),
                may_come=self.may_come,
                queue_ends_in_s=lambda: QUEUE_ENDS_IN_S,
                new_sequence_id=lambda: next(self.ids),
                new_ticket=lambda: next(self.tickets).to_bytes(16, "big"),
                timers=TIMERS,
                max_attempts=max_attempts,
                draw=draw,
                block_size=lambda: block_size,
                allow_recompute=allow_recompute,
                foresee=foresee,
                spare_only_s=spare_only_s,
                model_digest=lambda: self.served,
            ),
            self.sink,
            deadline_s=deadline_s,
            first_token_due_s=first_token_due_s,
            resumed=resumed,
            prompt_sink=prompt_sink,
            model_digest=model_digest,
        )

    def clock(self) -> float:
        self.num_clock_calls += 1
        return self.now

    def place(self, query: Query) -> Placement | None:
        self.num_asked += 1
        self.asked = query = query._replace(block_keys=KEYS, block_size=1)
        if self.is_full:
            return None
        placed = self.policy.place(query, self.snapshot())
        return replace(placed, in_order=self.in_order) if isinstance(placed, Paired) else placed

    def may_come(self) -> bool:
        return self.asked is None or self.policy.may_come(self.asked, self.snapshot())

    def snapshot(self) -> Snapshot:
        prefills, decodes = tuple(self.prefills), tuple(self.decodes)
        return snapshot(prefills, decodes, local_prefill=self.local_prefill)

    def sink(self, token_ids: Sequence[int], margins: object, logprobs: object) -> bool:
        assert self.outcome is None
        self.emitted.extend(token_ids)
        return self.stop_at is not None and len(self.emitted) >= self.stop_at

    def on(self, event: Event) -> None:
        """Let the machine handle it and execute what it says."""
        wanted = self.machine.handle(event)
        for action in wanted:
            assert self.outcome is None, "an action after the last"
            self.log.append(action)
            match action:
                case actions.OpenLease():
                    assert action.sequence_id not in self.leases
                    assert not self.leases, "one lease at a time"
                    self.check_order(action.worker, self.reservations.values())
                    self.leases[action.sequence_id] = action
                case actions.Reserve():
                    assert action.sequence_id not in self.reservations
                    assert not self.reservations, "one reservation at a time"
                    self.check_order(action.worker, self.leases.values())
                    self.reservations[action.sequence_id] = action
                case actions.CloseLease():
                    del self.leases[action.sequence_id]
                case actions.Release():
                    del self.reservations[action.sequence_id]
                case actions.Grant():
                    assert action.sequence_id in self.leases
                    self.grants[action.sequence_id] = action
                case actions.Bind():
                    assert action.sequence_id in self.reservations
                    self.binds[action.sequence_id] = action
                case actions.Start():
                    reservation = self.reservations[action.sequence_id]
                    assert list(action.emitted) == self.emitted[reservation.num_emitted :]
                    self.started[action.sequence_id] = action
                case actions.Enqueue():
                    assert not self.queued
                    assert not self.leases
                    assert not self.reservations
                    self.queued = True
                case actions.Dequeue():
                    assert self.queued
                    self.queued = False
                case actions.Pump():
                    pass
                case actions.RunLocally():
                    self.ran_locally.append(action.why)
                case actions.Retried():
                    self.retries.append(action.retry.value)
                case actions.Finish():
                    self.outcome = action.reason
                case actions.Fail():
                    self.outcome = action.error
        if any(isinstance(action, actions.Pump | actions.Enqueue) for action in wanted):
            self.pump()

    def pump(self, *, room_made: bool = False) -> None:
        if self.queued:
            self.on(events.Offered(room_made))

    # What the lease and the reservation are asked and answer

    @property
    def lease(self) -> actions.OpenLease:
        (only,) = self.leases.values()
        return only

    @property
    def reservation(self) -> actions.Reserve:
        (only,) = self.reservations.values()
        return only

    def accept(self, cached: int = 0) -> None:
        self.on(events.Accepted(self.lease.sequence_id, cached))

    def reserve(self, cached: int = 0) -> None:
        self.on(events.Reserved(self.reservation.sequence_id, cached))

    def grant(self) -> None:
        grant = self.grants[self.lease.sequence_id]
        self.on(events.Granted(self.lease.sequence_id, grant.grant_id))

    def first(self, token: int = 20, reason: int = 0) -> None:
        position = len(PROMPT) + self.lease.num_emitted
        self.on(events.FirstToken(self.lease.sequence_id, token, position, None, reason))

    def prove(self) -> None:
        bind = self.binds[self.reservation.sequence_id]
        stats = common_pb2.TransferStats(num_bytes=7)
        self.on(events.Proven(bind.sequence_id, bind.bind_id, stats))

    def pull_fails(self, reason: int = decode_pb2.PULL_FAILURE_TRANSPORT) -> None:
        bind = self.binds[self.reservation.sequence_id]
        self.on(events.PullFailed(bind.sequence_id, bind.bind_id, reason, "cut"))

    def lose_lease(self, error: DiptychError | None = None) -> None:
        sequence_id, _ = self.leases.popitem()
        self.on(events.LeaseEnded(sequence_id, error or NoWorkerError("gone")))

    def lose_reservation(self) -> None:
        sequence_id, _ = self.reservations.popitem()
        self.on(events.ReservationLost(sequence_id, "gone"))

    def end_reservation(
        self, reason: int = 0, error: DiptychError | None = None, preemptions: int = 0
    ) -> None:
        sequence_id, _ = self.reservations.popitem()
        ended = decode_pb2.Ended(sequence_id=sequence_id, num_preemptions=preemptions)
        if reason:
            ended.finish_reason = common_pb2.FinishReason.Name(reason)  # type: ignore[assignment]
        if error is not None:
            ended.failure.CopyFrom(to_failure(error))
        self.on(decoded(ended))

    def tokens(self, *token_ids: int, position: int | None = None) -> None:
        if position is None:
            position = len(PROMPT) + len(self.emitted)
        sequence_id = self.reservation.sequence_id
        self.on(events.Tokens(sequence_id, position, token_ids, ()))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.on(events.Tick())

    def begin(self) -> "World":
        self.on(events.Begin())
        return self

    def bind(self) -> None:
        """From placed until the reservation may pull."""
        self.accept()
        self.reserve()
        self.grant()

    def hand_off(self) -> None:
        """From placed until the reservation runs; the first token is 20."""
        self.bind()
        self.first()
        self.prove()

    def check_order(
        self, asked: WorkerId, held: Iterable[actions.OpenLease | actions.Reserve]
    ) -> None:
        """Who holds the greater of two asks nothing of the lesser."""
        if self.in_order:
            assert all(each.worker.incarnation < asked.incarnation for each in held)

    def check_nothing_is_held(self) -> None:
        assert not self.leases
        assert not self.reservations
        assert not self.queued

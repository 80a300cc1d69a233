"""Sends one request's actions to workers: streams of leases, commands about reservations."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from diptych.block_hash import block_keys
from diptych.service_level import MAX_OBJECTIVE_MS
from diptych.telemetry import tracing
from diptych.v1 import common_pb2, decode_pb2, prefill_pb2
from router.cluster.decode_link import DecodeLink, ReservationListener
from router.cluster.prefill_link import LeaseListener, PrefillLink
from router.placement.claim import Asked
from router.placement.eligible import ordered
from router.placement.fair_queue import Turn
from router.placement.placement import DecodeOnly, Forecast, Paired, Placement, Unreachable, Why
from router.placement.query import Query
from router.placement.spare import seen_by, will_yield
from router.placement.views import WorkerId
from router.request import actions, events, worker_messages
from router.request.events import Event
from router.request.observer import Observer, Waits
from router.request.prompt_told import Wanted
from router.request.resolved import ResolvedRequest
from router.request.services import Services
from router.request.terms import Terms

_MOST_S: Final = MAX_OBJECTIVE_MS / 1000  # of an objective, that workers are told


class _Foretold(NamedTuple):
    """What was foretold of the newest placement, and since when it is awaited (monotonic, s)."""

    forecast: Forecast
    since_s: float  # it was placed then, or had its first token
    is_decoded: bool  # by a decode worker alone, in its first tokens


@dataclass(slots=True)
class _Lease:
    stream: PrefillLink
    worker: WorkerId
    is_expected: bool  # the prompt is counted on at its worker, which has not computed it yet
    is_accepted: bool = False


@dataclass(slots=True)
class _Reservation:
    link: DecodeLink
    worker: WorkerId


class Dispatch:
    """Knows how to reach what the request holds; decides nothing. Event loop only.

    Invariant: an id is known here from being opened until it was closed or its
    worker said that it is gone (``heard``).
    """

    def __init__(
        self,
        request_id: str,
        request: ResolvedRequest,
        terms: Terms,
        services: Services,
        observer: Observer,
        beside: WorkerId | None = None,
    ) -> None:
        """``observer`` says what workers' spans hang under; ``beside``, who has the prompt."""
        self._beside = beside
        self._request_id = request_id
        self._request = request
        self._terms = terms
        self._sampling = request.sampling.to_proto()
        self._services = services
        self._observer = observer
        self._leases: dict[int, _Lease] = {}
        self._reservations: dict[int, _Reservation] = {}
        self._expecting: set[int] = set()  # sequences that started, until a first token
        self._keys: tuple[bytes, ...] | None = None
        self._block_size = 0
        self.is_held = False  # not for want of room: some objective would have been missed
        self._foretold: _Foretold | None = None  # of the first token that is to come
        self._going_on: _Foretold | None = None  # of the second, whose KV moves
        self._in_order: Paired | None = None  # placed newly, not all of which was asked for
        self._asked: Query | None = None  # the newest that asked for a placement
        self._yields: bool | None = None  # its sequences, to those of others; None: never placed

    @property
    def awaits_tokens(self) -> bool:
        """Whether tokens are news here; of all others ``heard`` need not be told."""
        is_awaited = self._is_decode_foretold or self._going_on is not None
        return is_awaited or bool(self._expecting)

    def place(self, query: Query) -> Placement | None:
        """Ask the policy, with the prompt's block keys."""
        cluster = self._services.cluster
        query = self._whole(query)
        self._asked = query
        policy, snapshot = self._services.policy, cluster.snapshot()
        placement = ordered(policy.place(query, seen_by(query, snapshot)), snapshot)
        self._forget_second_half()
        self.is_held = placement is None and policy.has_declined
        if placement is None:
            self._observer.waits(Waits.OBJECTIVES if self.is_held else Waits.ROOM)
        elif self._yields is None:
            others_wait = self._services.room.has_others_than(self._request.claim.request_class)
            self._yields = will_yield(query, others_wait=others_wait)
        if isinstance(placement, DecodeOnly) and self.is_beside(placement.decode, placement.why):
            return placement
        if placement is not None and self._observer.is_traced:
            self._observer.placed(placement, policy.explain(query, snapshot, placement))
        holds_one = query.on_prefill is not None or query.on_decode is not None
        if isinstance(placement, Paired) and placement.in_order and not holds_one:
            self._in_order = placement
        self._foretold = self._going_on = None  # what an earlier one foretold has not come true
        forecast = placement.forecast if isinstance(placement, Paired | DecodeOnly) else None
        self._terms.placed(forecast, query.num_tokens - len(self._request.shape.prompt_ids))
        if forecast is not None:
            self._observer.foretold(forecast)
            is_decoded = isinstance(placement, DecodeOnly)
            self._foretold = _Foretold(forecast, time.monotonic(), is_decoded)
        return placement

    def foresee(self, query: Query, is_new: bool) -> Unreachable | None:
        """Whether the request's objectives are lost; None: they are not, or it is not known.

        One that is new is not judged where there is room: the pump that it makes due is soon, and
        whoever else came with it may be on other workers by then. Without room, or where as many
        are placed as may be, it stands behind others that wait.
        """
        services, snapshot, wait_s = self._services, self._services.cluster.snapshot(), 0.0
        if is_new:
            asked = Asked(self._request.claim.payer, self.may_be_local())
            if services.room.has_slots and snapshot.has_room_for((asked,)):
                return None
            turn = self.turn()
            num_engines = len(snapshot.prefill) or len(snapshot.decode) or 1
            wait_s = services.room.wait_s(turn, num_engines)
        return services.policy.foresee(self._whole(query), snapshot, wait_s)

    def turn(self) -> Turn:
        """What the request waits by. Of its prompt what some worker has cached costs nothing."""
        num_blocks = self._services.policy.cache.most_hit_blocks(self._prompt_keys())
        turn = self._terms.turn(num_blocks * self._block_size)
        return turn._replace(may_be_local=self.may_be_local())

    def may_be_local(self) -> bool:
        """Whether a decode worker may compute its prompt, as things are now."""
        keys, request = self._prompt_keys(), self._request
        num_tokens = len(request.shape.prompt_ids) + len(request.emitted_token_ids)
        query = Query(
            num_tokens=num_tokens,
            num_max_tokens=num_tokens,
            block_keys=keys,
            block_size=self._block_size,
            objectives=self._terms.objectives(),
        )
        is_near = self._beside is not None  # where another choice has all of the prompt
        services = self._services
        return is_near or services.policy.may_be_local(query, services.cluster.snapshot())

    def may_come(self) -> bool:
        """Whether workers that are there could take what was asked for last, had they room."""
        services, query = self._services, self._asked
        return query is None or services.policy.may_come(query, services.cluster.snapshot())

    def _prompt_keys(self) -> tuple[bytes, ...]:
        if self._keys is None:
            self._block_size = self._services.cluster.block_size()
            prompt_ids, salt = self._request.shape.prompt_ids, self._request.cache_salt
            self._keys = tuple(block_keys(prompt_ids, self._block_size, salt))
        return self._keys

    def _whole(self, query: Query) -> Query:
        """With what its machine does not know."""
        num_prompt = len(self._request.shape.prompt_ids)
        return query._replace(
            block_keys=self._prompt_keys(),
            block_size=self._block_size,
            beside=self._beside,
            payer=self._request.claim.payer,
            is_batch=self._request.claim.is_batch,
            objectives=self._terms.objectives(),
            num_output_tokens=self._terms.num_expected(query.num_tokens - num_prompt),
            now_s=time.monotonic(),
        )

    def waits(self, turn: Turn) -> None:
        """The request enters the queue: say what for, unless it is the next."""
        if not self._services.cluster.snapshot().has_room_for((turn.asked,)):
            self._observer.waits(Waits.ROOM)
        elif self._services.room.num_waiting:
            self._observer.waits(Waits.TURN)

    def is_beside(self, worker: WorkerId | None, why: Why) -> bool:
        """Whether it shares another choice's blocks there, so that its own way is none to tell."""
        return self._beside is not None and worker == self._beside and why is Why.CHOICE

    def open_lease(
        self,
        action: actions.OpenLease,
        emitted: Sequence[int],
        listener: LeaseListener,
        untold: Wanted | None = None,
    ) -> bool:
        """Open the lease's stream; False if its worker is gone.

        ``untold``: what the worker is to tell of the prompt.
        """
        watch = self._services.cluster.prefill_watch(action.worker)
        if watch is None:
            return False
        start = prefill_pb2.PrefillStart(
            router_incarnation=self._services.incarnation,
            sequence_id=action.sequence_id,
            request_id=self._request_id,
            spec=self._spec(emitted[: action.num_emitted]),
            report=None if untold is None else worker_messages.report(untold),
        )
        stream = PrefillLink(
            watch.channel,
            start,
            listener,
            worker=action.worker,
            timers=self._services.config.timers,
            metadata=tracing.inject_metadata(self._observer.prefill_asked(action.worker)),
        )
        is_expected = self._expect(action.worker)
        self._leases[action.sequence_id] = _Lease(stream, action.worker, is_expected)
        num_tokens = len(start.spec.token_ids)
        self._services.cluster.prefill_backlog.opened(
            action.sequence_id, action.worker, num_tokens, start.spec.payer
        )
        self._services.spawn(stream.run(), f"lease {action.sequence_id}")
        self._asked_half(action.worker)
        return True

    def grant(self, action: actions.Grant) -> None:
        """Send a Grant."""
        lease = self._leases.get(action.sequence_id)
        if lease is not None:
            lease.stream.grant(worker_messages.grant(action))

    def heard(self, event: Event) -> None:
        """Book what a worker said, before the machine answers to it."""
        backlog = self._services.cluster.prefill_backlog
        match event:
            case events.Accepted():
                backlog.accepted(event.sequence_id, event.num_cached_tokens)
                self._lease_accepted(event.sequence_id)
                self._services.room.pump_soon()  # there is more runway
            case events.FirstToken():
                backlog.computed(event.sequence_id)
                self._lease_computed(event.sequence_id)
                self._going_on = self._came_true()
            case events.Tokens():
                self._tokens_came(event.sequence_id)
                if self._is_decode_foretold:
                    self._came_true()
                self._went_on()
            case events.PullFailed():
                self._going_on = None  # another pull is no measure of the one that was foretold
            case events.LeaseEnded():
                self._foretold = None
                self._forget_lease(event.sequence_id)
            case events.Ended() | events.ReservationLost():
                if self._is_decode_foretold:
                    self._foretold = None
                self._going_on = None
                self._forget_reservation(event.sequence_id)

    def close_lease(self, sequence_id: int) -> None:
        """End the lease's stream."""
        lease = self._forget_lease(sequence_id)
        if lease is not None:
            lease.stream.close()

    def reserve(
        self, action: actions.Reserve, emitted: Sequence[int], listener: ReservationListener
    ) -> bool:
        """Send a Reserve; False if its worker is gone."""
        link = self._services.cluster.decode_link(action.worker)
        reserve = decode_pb2.Reserve(
            sequence_id=action.sequence_id,
            request_id=self._request_id,
            spec=self._spec(emitted[: action.num_emitted]),
            trace_context=tracing.inject_map(self._observer.decode_asked(action.worker)),
            to_pull=action.to_pull,
        )
        answer = self._terms.to_come(action.num_emitted)
        if link is None or not link.reserve(reserve, listener, answer):
            return False
        self._reservations[action.sequence_id] = _Reservation(link, action.worker)
        self._asked_half(action.worker)
        return True

    def bind(self, action: actions.Bind) -> None:
        """Send a Bind."""
        held = self._reservations.get(action.sequence_id)
        if held is not None:
            held.link.bind(worker_messages.bind(action, self._attempt()))

    def start(self, action: actions.Start) -> None:
        """Send a Start."""
        held = self._reservations.get(action.sequence_id)
        if held is not None:
            if action.sequence_id not in self._expecting and self._expect(held.worker):
                self._expecting.add(action.sequence_id)
            self._observer.started()
            held.link.start(worker_messages.start(action, self._attempt()))

    def release(self, sequence_id: int) -> None:
        """Send a Release."""
        held = self._forget_reservation(sequence_id)
        if held is not None:
            held.link.release(sequence_id)

    def close_all(self) -> None:
        """Free whatever is held (the state machine broke)."""
        for sequence_id in list(self._leases):
            self.close_lease(sequence_id)
        for sequence_id in list(self._reservations):
            self.release(sequence_id)

    @property
    def _is_decode_foretold(self) -> bool:
        return self._foretold is not None and self._foretold.is_decoded

    def _came_true(self) -> _Foretold | None:
        """The first token of a placement is there; another one's was not foretold.

        What was foretold of the next, from now on.
        """
        self._services.room.reconsider()
        foretold, self._foretold = self._foretold, None
        if foretold is None:
            return None
        now_s = time.monotonic()
        self._services.policy.came_true(foretold.forecast, now_s - foretold.since_s)
        return foretold._replace(since_s=now_s)

    def _went_on(self) -> None:
        """The first tokens of who goes on with a prompt that was computed elsewhere are there."""
        going_on, self._going_on = self._going_on, None
        if going_on is not None:
            gap_s = time.monotonic() - going_on.since_s
            self._services.policy.went_on(going_on.forecast, gap_s)

    def _attempt(self) -> dict[str, str]:
        return tracing.inject_map(self._observer.attempt_context)

    def _lease_accepted(self, sequence_id: int) -> None:
        lease = self._leases.get(sequence_id)
        if lease is not None:
            lease.is_accepted = True

    def _lease_computed(self, sequence_id: int) -> None:
        lease = self._leases.get(sequence_id)
        if lease is not None:
            self._settle_lease(lease)

    def _forget_lease(self, sequence_id: int) -> _Lease | None:
        """A worker that never accepted the prompt has no more of it than others brought."""
        self._services.cluster.prefill_backlog.computed(sequence_id)
        lease = self._leases.pop(sequence_id, None)
        if lease is not None:
            self._services.cluster.second_halves.drop(self)
            self._settle_lease(lease)
        return lease

    def _asked_half(self, worker: WorkerId) -> None:
        """Of a pair in order: the other half will follow, or this was it."""
        halves, pair = self._services.cluster.second_halves, self._in_order
        if pair is None:
            return
        if self in halves:
            self._in_order = None
            halves.asked(self)
        else:
            halves.add(self, pair, worker, len(self._request.shape.prompt_ids))

    def _forget_second_half(self) -> None:
        """The request is placed anew."""
        self._in_order = None
        self._services.cluster.second_halves.drop(self)

    def _settle_lease(self, lease: _Lease) -> None:
        if not lease.is_expected or not self._keys:
            return
        lease.is_expected = False
        cache = self._services.policy.cache
        over = cache.settle if lease.is_accepted else cache.retract
        over(lease.worker.incarnation, self._keys)

    def _forget_reservation(self, sequence_id: int) -> _Reservation | None:
        held = self._reservations.pop(sequence_id, None)
        if held is not None:
            self._services.cluster.second_halves.drop(self)
            self._settle_reservation(sequence_id, held)
        return held

    def _tokens_came(self, sequence_id: int) -> None:
        """The prompt is there: its worker tells what becomes of it.

        Where the worker does not, the prompt is there as long as its sequence, for all that is
        known: other choices of it find it by that.
        """
        held, cache = self._reservations.get(sequence_id), self._services.policy.cache
        if held is not None and cache.seq(held.worker.incarnation) is not None:
            self._settle_reservation(sequence_id, held)

    def _settle_reservation(self, sequence_id: int, held: _Reservation) -> None:
        if sequence_id in self._expecting and self._keys:
            self._expecting.remove(sequence_id)
            self._services.policy.cache.settle(held.worker.incarnation, self._keys)

    def _expect(self, worker: WorkerId) -> bool:
        """Prompts that come together shall meet, so a worker is counted on from being asked.

        Of one that was forgotten nothing would ever be dropped again.
        """
        if not self._keys or not self._services.cluster.has_worker(worker):
            return False
        self._services.policy.cache.expect(worker.incarnation, self._keys)
        return True

    def _spec(self, emitted: Sequence[int]) -> common_pb2.SequenceSpec:
        prompt_ids, claim = self._request.shape.prompt_ids, self._request.claim
        wanted = self._terms.objectives()  # nobody wants to wait for all of a deadline
        due_in_s = wanted.ttft_s if wanted.is_first_asked_for and not emitted else None
        return common_pb2.SequenceSpec(
            token_ids=[*prompt_ids, *emitted],
            num_prompt_tokens=len(prompt_ids),
            sampling=self._sampling,
            cache_salt=self._request.cache_salt,
            yields=bool(self._yields),
            payer=claim.payer,
            tier=claim.request_class.tier,
            tier_weight=self._services.config.classes.weight_of[claim.request_class],
            tpot_s=min(claim.tpot_s or 0.0, _MOST_S),
            num_expected_tokens=len(emitted) + self._terms.num_expected(len(emitted)),
            due_in_s=None if due_in_s is None else min(max(due_in_s, -_MOST_S), _MOST_S),
        )

"""What one placement of one request asks of workers, and what they answer. Pure.

Messages take their time, a lease and a reservation are asked for at once (or one after the other,
where both workers have both roles), and blocks are pulled
as prefill completes them. The sequence starts where it decodes when its first token and its last
block are there.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

from diptych.engine.scheduling.sequence import Sequence, SequenceKey
from diptych.engine.scheduling.step import SequenceUpdate
from diptych.errors import BlocksComingError, BlocksExhaustedError, DiptychError
from diptych.request_class import RequestClass
from diptych.sampling_params import SamplingParams
from diptych.simulation.router import Seat, SimulatedRouter
from diptych.simulation.seen import DecodeSeen, PrefillSeen
from router.placement.answer_length import AnswerLength
from router.placement.claim import payer_of
from router.placement.fair_queue import DEFAULT_WEIGHTS
from router.placement.placement import DecodeOnly, Paired, Placement, PrefillOnly
from router.placement.promises import Promise
from router.placement.query import NO_OBJECTIVES, Objectives
from router.placement.views import WorkerId


class Request(NamedTuple):
    """What is asked for, as the router knows it."""

    number: int
    due_s: float
    prompt_ids: list[int]
    num_output_tokens: int
    block_keys: tuple[bytes, ...]  # of the prompt's whole blocks
    objectives: Objectives = NO_OBJECTIVES
    may_refuse: bool = False  # rather than serve it when its objectives look lost
    is_cut_off: bool = False  # its answer, or else it ends by itself
    request_class: RequestClass = RequestClass.STANDARD
    tenant: str = ""
    yields: bool = False  # leaves workers' room to others, as it was placed
    answer: AnswerLength | None = None  # as the router had it when it was placed

    @property
    def num_expected_tokens(self) -> int:
        """Of its answer; 0: not known."""
        return 0 if self.answer is None else self.answer.num_tokens

    @property
    def payer(self) -> bytes:
        """By what workers know whose turn it is."""
        return payer_of(self.request_class, self.tenant)

    def sequence(self, owner: str, *, prefill_only: bool, to_pull: bool = False) -> Sequence:
        """As one worker has it, of that router."""
        wanted = self.objectives
        return Sequence(
            key=SequenceKey(owner, self.number),
            token_ids=list(self.prompt_ids),
            num_prompt_tokens=len(self.prompt_ids),
            sampling=SamplingParams(temperature=0.0, max_tokens=self.num_output_tokens),
            prefill_only=prefill_only,
            to_pull=to_pull,
            block_keys=list(self.block_keys),
            yields=self.yields,
            payer=self.payer,
            tier=self.request_class.tier,
            tier_weight=DEFAULT_WEIGHTS[self.request_class],
            due_s=math.inf if wanted.ttft_s is None else self.due_s + wanted.ttft_s,
            tpot_s=wanted.tpot_s or 0.0,
            num_expected_tokens=self.num_expected_tokens,
        )


class Owner(Protocol):
    """Whose attempt it is. Called when the router hears of it."""

    def refused(self, worker: WorkerId, error: DiptychError) -> None:
        """A worker said no."""
        ...

    def settled(self) -> None:
        """Workers granted all that was asked for."""
        ...

    def drew_first(self) -> None:
        """The first token is there."""
        ...

    def went_on(self) -> None:
        """The first token is there that whoever pulled the prompt has drawn."""
        ...

    def ended(self) -> None:
        """The last token is there."""
        ...


class _Lease:
    """A prompt on a prefill worker."""

    def __init__(self, seat: Seat[PrefillSeen], seq: Sequence) -> None:
        self.seat = seat
        self.seq = seq
        self.is_expected = False  # the prompt is counted on there, and has not been computed yet
        self.is_at_worker = False
        self.is_accepted = False


class _Reservation:
    """A sequence on a decode worker."""

    def __init__(self, seat: Seat[DecodeSeen], seq: Sequence) -> None:
        self.seat = seat
        self.seq = seq
        self.num_there = 0  # tokens whose KV is there, or asked for
        self.is_at_worker = False
        self.is_granted = False
        self.pulled_s = 0.0  # when what was asked for has come
        self.is_expected = False  # started: the prompt is counted on, and no token has come yet


class Attempt:
    """Everything that one placement holds. Nothing comes of it after ``close``."""

    def __init__(self, router: SimulatedRouter, request: Request, owner: Owner) -> None:
        self.has_first = False
        self._router = router
        self._agenda = router.agenda
        self._request = request
        answer, tpot_s = request.answer, request.objectives.tpot_s
        self._promise = Promise(tpot_s, request.num_expected_tokens, answer)
        self._owner = owner
        self._is_open = True
        self._is_proven = False
        self._has_gone_on = False  # the reader has drawn a token
        self._drawn_s = 0.0
        self._lease: _Lease | None = None
        self._reservation: _Reservation | None = None
        self._ask_next: Callable[[], None] | None = None  # for the other half, once one is held
        self._is_computed = False  # the lease's prompt

    def open(self, placement: Placement) -> None:
        """Ask for all of it; of a pair in order for the lesser incarnation's half first."""
        match placement:
            case Paired(in_order=True):
                self._ask_in_order(placement)
            case Paired():
                self._ask_lease(placement.prefill)
                self._ask_reservation(placement.decode, to_pull=True)
            case PrefillOnly():
                self._ask_lease(placement.prefill)
            case DecodeOnly():
                self._ask_reservation(placement.decode, to_pull=False)

    def close(self) -> None:
        """Give back whatever is held. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._router.second_halves.drop(self)
            self._close_lease()
            self._close_reservation()

    def _later(self, happening: Callable[[], None], at_s: float | None = None) -> None:
        """A message's time later, or then, unless the attempt is closed by then."""
        message_s = self._router.wires.message_s
        at_s = self._agenda.now_s + message_s if at_s is None else at_s
        self._agenda.at(at_s, self._if_open(happening))

    def _if_open(self, happening: Callable[[], None]) -> Callable[[], None]:
        def if_open() -> None:
            if self._is_open:
                happening()

        return if_open

    def _refused(self, worker: WorkerId, error: DiptychError) -> None:
        self._later(lambda: self._owner.refused(worker, error))

    def _ask_in_order(self, pair: Paired) -> None:
        def lease() -> None:
            self._ask_lease(pair.prefill)

        def reserve() -> None:
            self._ask_reservation(pair.decode, to_pull=True)

        is_lease_first = pair.prefill.incarnation < pair.decode.incarnation
        first, self._ask_next = (lease, reserve) if is_lease_first else (reserve, lease)
        first()
        asked = pair.prefill if is_lease_first else pair.decode
        num_tokens = len(self._request.prompt_ids)
        self._router.second_halves.add(self, pair, asked, num_tokens)

    def _settle_if_granted(self) -> None:
        following, self._ask_next = self._ask_next, None
        if following is not None:
            following()
            self._router.second_halves.asked(self)
            return
        lease, held = self._lease, self._reservation
        if (lease is None or lease.is_accepted) and (held is None or held.is_granted):
            self._owner.settled()

    # The lease

    def _ask_lease(self, worker: WorkerId) -> None:
        seq = self._request.sequence(self._router.name, prefill_only=True)
        lease = _Lease(self._router.prefill[worker], seq)
        self._lease = lease
        if self._request.block_keys:
            lease.is_expected = True
            self._router.policy.cache.expect(worker.incarnation, self._request.block_keys)
        num_tokens = len(self._request.prompt_ids)
        self._router.backlog.opened(self._request.number, worker, num_tokens, self._request.payer)
        self._later(lambda: self._begin_lease(lease))

    def _begin_lease(self, lease: _Lease) -> None:
        try:
            lease.seat.host.engine.add_prefill(
                lease.seq, lambda update: self._on_prefill(lease, update)
            )
        except BlocksComingError:  # others leave for it
            lease.seat.host.engine.after_step(self._if_open(lambda: self._begin_lease(lease)))
        except BlocksExhaustedError as error:
            self._refused(lease.seat.host.worker, error)
        else:
            lease.seat.host.work_came(self._router.place)
            lease.is_at_worker = True
            self._pull_cached()
            self._later(lambda: self._accepted(lease, lease.seq.num_cached_tokens))

    def _accepted(self, lease: _Lease, num_cached_tokens: int) -> None:
        lease.is_accepted = True
        self._router.backlog.accepted(self._request.number, num_cached_tokens)
        self._router.room.pump_soon()  # there is more runway
        self._settle_if_granted()

    def _on_prefill(self, lease: _Lease, update: SequenceUpdate) -> None:
        self._is_computed = update.token is not None
        held = self._reservation
        if self._is_computed:
            self._drawn_s = self._agenda.now_s
            self._later(self._drew_first)
        if held is not None and held.is_at_worker:
            self._pull(held, update.num_computed_tokens)

    def _drew_first(self) -> None:
        self.has_first = True
        self._router.backlog.computed(self._request.number)
        if self._lease is not None:
            self._settle_lease(self._lease)
        self._router.room.reconsider()
        self._owner.drew_first()
        if self._reservation is None:
            self._owner.ended()
        else:
            self._start_if_proven(self._reservation)

    def _close_lease(self) -> None:
        lease, self._lease = self._lease, None
        if lease is None:
            return
        self._router.backlog.computed(self._request.number)
        self._settle_lease(lease)
        lease.seat.host.engine.release(lease.seq)

    def _settle_lease(self, lease: _Lease) -> None:
        if lease.is_expected:
            lease.is_expected = False
            cache = self._router.policy.cache
            over = cache.settle if lease.is_accepted else cache.retract
            over(lease.seat.host.worker.incarnation, self._request.block_keys)

    # The reservation

    def _ask_reservation(self, worker: WorkerId, *, to_pull: bool) -> None:
        seq = self._request.sequence(self._router.name, prefill_only=False, to_pull=to_pull)
        held = _Reservation(self._router.decode[worker], seq)
        self._reservation = held
        num_tokens = 0 if to_pull else seq.num_tokens
        is_batch = self._request.request_class is RequestClass.BATCH
        payer = None if is_batch else self._request.payer
        held.seat.seen.asked(self._request.number, payer, num_tokens, self._promise)
        self._later(lambda: self._reserve(held))

    def _reserve(self, held: _Reservation) -> None:
        try:
            held.seat.host.engine.reserve(held.seq, lambda update: self._on_decode(held, update))
        except BlocksComingError:
            held.seat.host.engine.after_step(self._if_open(lambda: self._reserve(held)))
        except BlocksExhaustedError as error:
            self._refused(held.seat.host.worker, error)
        else:
            held.num_there = held.seq.num_cached_tokens
            held.pulled_s = self._agenda.now_s
            held.is_at_worker = True
            held.seat.host.work_came(self._router.place)
            self._later(lambda: self._reserved(held))
            if self._is_computed:
                self._pull(held, len(self._request.prompt_ids))
            else:
                self._pull_cached()

    def _reserved(self, held: _Reservation) -> None:
        held.is_granted = True
        held.seat.seen.reserved(self._request.number, held.seq.num_cached_tokens)
        self._settle_if_granted()
        if not held.seq.to_pull:
            self._start(held)

    def _pull_cached(self) -> None:
        """What the source had before, as soon as both are there."""
        lease, held = self._lease, self._reservation
        if lease is not None and lease.is_at_worker and held is not None and held.is_at_worker:
            self._pull(held, lease.seq.num_cached_tokens)

    def _pull(self, held: _Reservation, num_computed_tokens: int) -> None:
        """Whole blocks, as soon as they are computed; the last one with the prompt's end."""
        end = num_computed_tokens
        if end < len(self._request.prompt_ids):
            end -= end % self._router.block_size
        if end > held.num_there:
            wires = self._router.wires
            num_bytes = (end - held.num_there) * wires.kv_bytes_per_token
            held.pulled_s = held.seat.host.pull(num_bytes, wires.bytes_per_s)
            held.num_there = end
        if self._is_computed:
            proven_s = held.pulled_s + self._router.wires.pull_s
            self._later(lambda: self._proven(held), at_s=proven_s)

    def _proven(self, held: _Reservation) -> None:
        held.seat.host.engine.mark_proven(held.seq)
        self._close_lease_at_worker()
        self._later(lambda: self._heard_proven(held))

    def _close_lease_at_worker(self) -> None:
        """The reader has all of it."""
        if self._lease is not None:
            self._lease.seat.host.engine.release(self._lease.seq)

    def _heard_proven(self, held: _Reservation) -> None:
        self._is_proven = True
        self._start_if_proven(held)

    def _start_if_proven(self, held: _Reservation) -> None:
        if self.has_first and self._is_proven:
            self._start(held)

    def _start(self, held: _Reservation) -> None:
        if self._request.block_keys:
            held.is_expected = True
            incarnation = held.seat.host.worker.incarnation
            self._router.policy.cache.expect(incarnation, self._request.block_keys)
        if held.seq.to_pull:  # all of it is there already
            self._settle_reservation(held)
        held.seat.seen.started(self._request.number, self._agenda.now_s)
        self._later(lambda: self._run(held))

    def _run(self, held: _Reservation) -> None:
        if held.seq.to_pull:
            held.seat.host.engine.start(held.seq, [self._request.number], self._drawn_s)
        else:
            held.seat.host.engine.start(held.seq, [])
            held.seat.host.work_came(self._router.place)

    def _on_decode(self, held: _Reservation, update: SequenceUpdate) -> None:
        if not self.has_first and not held.seq.to_pull:
            self.has_first = True
            self._later(lambda: self._drew_alone(held))
        elif held.seq.to_pull and not self._has_gone_on:
            self._has_gone_on = True
            self._later(lambda: self._went_on(held))
        if update.finish_reason is not None:
            self._later(self._owner.ended)

    def _went_on(self, held: _Reservation) -> None:
        held.seat.seen.drew_first(self._request.number)
        self._owner.went_on()

    def _drew_alone(self, held: _Reservation) -> None:
        self._settle_reservation(held)
        held.seat.seen.drew_first(self._request.number)
        self._owner.drew_first()

    def _settle_reservation(self, held: _Reservation) -> None:
        if held.is_expected:
            held.is_expected = False
            incarnation = held.seat.host.worker.incarnation
            self._router.policy.cache.settle(incarnation, self._request.block_keys)

    def _close_reservation(self) -> None:
        held, self._reservation = self._reservation, None
        if held is not None:
            self._settle_reservation(held)
            held.seat.seen.ended(self._request.number)
            held.seat.host.engine.release(held.seq)

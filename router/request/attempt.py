"""What a request holds on workers now: a lease, a reservation, and what was sent to them. Pure.

Says how a lease and a reservation go together (grant, bind, start, close) and
keeps their states; which workers to use is decided by
:class:`router.request.machine.RequestMachine`, the owner, and what to do when something
fails by :mod:`router.request.recovery`.
"""

from collections.abc import Callable, Sequence

from diptych.v1 import common_pb2
from router.generation.answer import KVPath
from router.placement.placement import DecodeOnly, Paired, Placement, PrefillOnly, Why
from router.placement.views import WorkerId
from router.request import actions, events
from router.request.actions import Action
from router.request.decode_reservation import (
    DecodeReservation,
    ReservationEvent,
    ReservationState,
)
from router.request.deps import RequestDeps
from router.request.prefill_lease import PrefillLease, PrefillLeaseEvent, PrefillLeaseState


class Attempt:
    """The newest attempt's lease and reservation, at most one of each at a time.

    Invariant: what was opened is closed by an action, or its worker said that it
    is gone (``drop_lease``, ``drop_reservation``).

    Of a pair both are asked at once; or one after the other (``Paired.in_order``), first the one
    of the lesser incarnation, as all requests do: then no two hold each what the other lacks.
    """

    def __init__(
        self, num_prompt_tokens: int, deps: RequestDeps, do: Callable[[Action], None]
    ) -> None:
        """``do`` gets what has to be sent, in order."""
        self.lease: PrefillLease | None = None
        self.reservation: DecodeReservation | None = None
        self.computing: set[WorkerId] = set()  # those that were asked to compute
        self.base = 0  # output tokens that both their specs contain
        self.kv_path = KVPath.UNSPECIFIED
        self.prefill_worker = ""  # addresses, for the client
        self.decode_worker = ""
        self.transfer: common_pb2.TransferStats | None = None  # of the hand-off that served
        self.num_cached_tokens: int | None = None  # of the prompt, on whoever computed it
        self._num_prompt_tokens = num_prompt_tokens
        self._deps = deps
        self._do = do
        self._emitted_s: float | None = None  # when its first token came, from the lease
        self._is_in_order = False
        self._next: WorkerId | None = None  # to be asked for the other half, once one is held

    @property
    def is_settled(self) -> bool:
        """Whether something is held, and everything that was asked for."""
        lease, held = self.lease, self.reservation
        if (lease is None and held is None) or self._next is not None:
            return False
        return not (lease and lease.is_opening) and not (held and held.is_reserving)

    @property
    def is_rebinding(self) -> bool:
        """Whether a pull failed and the lease has not let its reader in again since."""
        held = self.reservation
        return held is not None and held.was_rebound and held.state is ReservationState.GRANTING

    @property
    def due_s(self) -> float | None:
        """When the first of the two that was asked for something must have answered."""
        lease, held = self.lease, self.reservation
        due = lease.due_s if lease is not None and lease.is_opening else None
        if held is not None and (held.is_reserving or held.is_granting):
            due = min(due or held.due_s, held.due_s)
        return due

    def lease_of(self, sequence_id: int) -> PrefillLease | None:
        """The lease, if it is this one."""
        lease = self.lease
        return lease if lease is not None and lease.sequence_id == sequence_id else None

    def reservation_of(self, sequence_id: int) -> DecodeReservation | None:
        """The reservation, if it is this one."""
        held = self.reservation
        return held if held is not None and held.sequence_id == sequence_id else None

    def emitted(self) -> None:
        """The first token of this attempt is out just now."""
        self._emitted_s = self._deps.clock()

    def may_ask(self, worker: WorkerId, pair: Paired) -> bool:
        """Whether it may be asked for the other half of what is held, so that both are ``pair``."""
        held = self.lease or self.reservation
        in_order = self._is_in_order or pair.in_order
        return not in_order or held is None or _is_before(held.worker, worker)

    def open(self, placement: Placement, num_emitted: int) -> None:
        """Begin anew with the prompt and the output so far; nothing is held."""
        assert self.lease is None
        assert self.reservation is None
        self.base = num_emitted
        self.computing = set()
        self.prefill_worker = self.decode_worker = ""
        self.transfer = None
        self._is_in_order = isinstance(placement, Paired) and placement.in_order
        match placement:
            case Paired():
                self.kv_path = KVPath.DISAGGREGATED
                self._open_pair(placement)
            case PrefillOnly():
                self.kv_path = KVPath.PREFILL_ONLY
                self.open_lease(placement.prefill)
            case DecodeOnly():
                self.kv_path = _local_path(placement.why)
                self.reserve(placement.decode, placement)

    def open_lease(self, worker: WorkerId) -> None:
        """Ask a prefill worker to compute and hold the prompt."""
        due_s = self._deps.clock() + self._deps.timers.accept_s
        self.lease = PrefillLease(worker, self._deps.new_sequence_id(), due_s)
        self.prefill_worker = worker.address
        self.computing.add(worker)
        self._do(actions.OpenLease(worker, self.lease.sequence_id, self.base))

    def reserve(self, worker: WorkerId, local: DecodeOnly | None = None) -> None:
        """Ask a decode worker for blocks; ``local``: there will be no lease to pull from."""
        due_s = self._deps.clock() + self._deps.timers.accept_s
        held = DecodeReservation(worker, self._deps.new_sequence_id(), due_s)
        if local is not None:
            held.local = local.why
            held.num_assumed_tokens = local.num_assumed_tokens
        self.reservation = held
        self.decode_worker = worker.address
        self._do(actions.Reserve(worker, held.sequence_id, self.base, to_pull=local is None))

    def pull_from(self, worker: WorkerId) -> None:
        """Open a lease on ``worker`` for the reservation that is held or asked for."""
        assert self.reservation is not None
        self.reservation.local = None
        self.kv_path = KVPath.DISAGGREGATED
        self.open_lease(worker)

    def accepted(self, event: events.Accepted) -> None:
        """The lease's blocks are held: the reservation may be let in, or asked for."""
        lease = self.lease_of(event.sequence_id)
        if lease is not None and lease.move(PrefillLeaseEvent.ACCEPTED):
            self._book_cached(event.num_cached_tokens)
            following = self._take_next()
            if following is not None:
                self.reserve(following)
            self.grant_if_held()

    def reserved(self, event: events.Reserved) -> DecodeReservation | None:
        """The reservation's blocks are held; this many tokens' KV are there. None: it is known."""
        held = self.reservation_of(event.sequence_id)
        if held is None:
            return None
        is_whole = event.num_cached_tokens >= self._num_prompt_tokens + self.base
        if not held.move(
            ReservationEvent.RESERVED_WHOLE if is_whole else ReservationEvent.RESERVED
        ):
            return None
        held.num_cached_tokens = event.num_cached_tokens
        following = self._take_next()
        if following is not None:
            self.open_lease(following)
        return held

    def grant_if_held(self) -> None:
        """Let the reservation pull, once both are held and something is missing."""
        lease, held = self.lease, self.reservation
        if lease is None or lease.is_opening:
            return
        if held is None or not held.move(ReservationEvent.GRANT):
            return
        held.due_s = self._deps.clock() + self._deps.timers.lost_peer_s
        lease.grant_id += 1
        lease.ticket = self._deps.new_ticket()
        self._do(actions.Grant(lease.sequence_id, lease.grant_id, lease.ticket, held.worker))

    def granted(self, event: events.Granted) -> None:
        """The ticket of that grant is valid: the reservation may use it."""
        lease, held = self.lease_of(event.sequence_id), self.reservation
        if lease is None or held is None or lease.grant_id != event.grant_id:
            return
        if not held.move(ReservationEvent.BIND):
            return
        held.bind_id += 1
        first = held.num_cached_tokens or 0
        self._do(actions.Bind(held.sequence_id, held.bind_id, lease.worker, lease.ticket, first))

    def proven(self, event: events.Proven) -> bool:
        """The KV landed whole and was confirmed. False: not that of the newest pull."""
        held = self._puller(event.sequence_id, event.bind_id)
        if held is None or not held.move(ReservationEvent.PROVEN):
            return False
        held.stats = event.stats
        return True

    def pull_failed(self, event: events.PullFailed) -> DecodeReservation | None:
        """The reservation stands without proof. None: not the newest pull."""
        held = self._puller(event.sequence_id, event.bind_id)
        if held is None or not held.move(ReservationEvent.PULL_FAILED):
            return None
        return held

    def start_if_proven(self, output: Sequence[int]) -> bool:
        """Start what is proven once the lease's token is known, and close the lease."""
        lease, held = self.lease, self.reservation
        if lease is None or lease.state is not PrefillLeaseState.SAMPLED:
            return False
        if held is None or held.state is not ReservationState.PROVEN:
            return False
        self.transfer = held.stats
        self._start(held, output, compute=False)
        self.close_lease()
        return True

    def compute_on_reservation(self, why: Why, output: Sequence[int]) -> bool:
        """Let it compute what it lacks, now or when it is held; True if it runs now."""
        held = self.reservation
        assert held is not None
        self.close_lease()
        self.kv_path = _local_path(why)
        self.prefill_worker = ""
        self.transfer = held.stats
        held.local = why
        if held.is_reserving:
            return False
        if held.stats is None:  # nothing came from elsewhere
            self._book_cached(self._num_spared(held, output))
        self._do(actions.RunLocally(why))
        self._start(held, output, compute=True)
        return True

    def close(self) -> None:
        """Free the lease and the reservation."""
        self._next = None
        self.close_reservation()
        self.close_lease()

    def close_lease(self) -> None:
        """Free the lease, if there is one."""
        if self.lease is not None:
            self._do(actions.CloseLease(self.lease.sequence_id))
            self.drop_lease()

    def close_reservation(self) -> None:
        """Free the reservation, if there is one."""
        if self.reservation is not None:
            self._do(actions.Release(self.reservation.sequence_id))
            self.drop_reservation()

    def drop_lease(self) -> None:
        """Forget the lease: its worker has, or was told to."""
        if self.lease is not None:
            self.lease.move(PrefillLeaseEvent.CLOSE)
            self.lease = None

    def drop_reservation(self) -> None:
        """Forget the reservation: its worker has, or was told to."""
        if self.reservation is not None:
            self.reservation.move(ReservationEvent.CLOSE)
            self.reservation = None

    def _open_pair(self, pair: Paired) -> None:
        if not pair.in_order:
            self.open_lease(pair.prefill)
            self.reserve(pair.decode)
        elif _is_before(pair.prefill, pair.decode):
            self._next = pair.decode
            self.open_lease(pair.prefill)
        else:
            self._next = pair.prefill
            self.reserve(pair.decode)

    def _take_next(self) -> WorkerId | None:
        following, self._next = self._next, None
        return following

    def _puller(self, sequence_id: int, bind_id: int) -> DecodeReservation | None:
        held = self.reservation_of(sequence_id)
        return held if held is not None and held.bind_id == bind_id else None

    def _start(self, held: DecodeReservation, output: Sequence[int], *, compute: bool) -> None:
        held.move(ReservationEvent.START)
        self.computing.add(held.worker)
        held.computes_behind = len(output) if compute else None
        emitted, age_s = tuple(output[self.base :]), 0.0
        if emitted and self._emitted_s is not None:
            age_s = self._deps.clock() - self._emitted_s
        self._do(actions.Start(held.sequence_id, emitted, compute, age_s))

    def _num_spared(self, held: DecodeReservation, output: Sequence[int]) -> int:
        """Tokens whose KV its worker need not compute.

        Where it has all of them and nothing follows, the last one's block is computed again, for
        its logits.
        """
        num_cached, num_tokens = held.num_cached_tokens or 0, self._num_prompt_tokens + self.base
        if num_cached < num_tokens or len(output) > self.base:
            return num_cached
        block_size = self._deps.block_size()
        return (num_tokens - 1) // block_size * block_size

    def _book_cached(self, num_tokens: int) -> None:
        """Over several attempts the least counts."""
        num_tokens = min(num_tokens, self._num_prompt_tokens)
        known = self.num_cached_tokens
        self.num_cached_tokens = num_tokens if known is None else min(known, num_tokens)


def _local_path(why: Why) -> KVPath:
    return KVPath.RECOMPUTED if why is Why.RECOMPUTE else KVPath.LOCAL


def _is_before(one: WorkerId, other: WorkerId) -> bool:
    """Every router has them in this order."""
    return one.incarnation < other.incarnation

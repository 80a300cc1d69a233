"""What a request holds on workers now: a lease, a seat, and what was sent to them. Pure.

Says how the two halves of an attempt go together (grant, bind, start, close) and
keeps their states; which workers to use, and what to do when something fails, is
decided by :class:`router.request.machine.RequestMachine`, the owner.
"""

from collections.abc import Callable, Sequence

from diptych.v1 import common_pb2, inference_pb2
from router.placement.types import DecodeOnly, Paired, Placement, PrefillOnly, Why, WorkerId
from router.request import actions
from router.request.actions import Action
from router.request.deps import Surroundings
from router.request.halves import Lease, LeaseEvent, LeaseState, Seat, SeatEvent, SeatState

KVPath = inference_pb2.KVPath


class Attempt:
    """The halves of the newest attempt; at most one lease and one seat at a time.

    Invariant: what was opened is closed by an action, or its worker said that it
    is gone (``drop_lease``, ``drop_seat``).
    """

    def __init__(
        self, num_prompt_tokens: int, around: Surroundings, do: Callable[[Action], None]
    ) -> None:
        """``do`` gets what has to be sent, in order."""
        self.lease: Lease | None = None
        self.seat: Seat | None = None
        self.base = 0  # output tokens that the halves' specs contain
        self.kv_path: int = KVPath.KV_PATH_UNSPECIFIED
        self.prefill_worker = ""  # addresses, for the client
        self.decode_worker = ""
        self.transfer: common_pb2.TransferStats | None = None  # of the hand-off that served
        self._num_prompt_tokens = num_prompt_tokens
        self._around = around
        self._do = do

    @property
    def is_settled(self) -> bool:
        """Whether every half that was asked for is held."""
        opening = self.lease is not None and self.lease.state is LeaseState.OPENING
        reserving = self.seat is not None and self.seat.state is SeatState.RESERVING
        return not opening and not reserving

    @property
    def is_rebinding(self) -> bool:
        """Whether a pull failed and the lease has not let its reader in again since."""
        seat = self.seat
        return seat is not None and seat.was_rebound and seat.state is SeatState.GRANTING

    @property
    def due_s(self) -> list[float]:
        """When the halves that were asked for must have answered."""
        due = []
        if self.lease is not None and self.lease.state is LeaseState.OPENING:
            due.append(self.lease.due_s)
        if self.seat is not None and self.seat.state is SeatState.RESERVING:
            due.append(self.seat.due_s)
        return due

    def lease_of(self, sequence_id: int) -> Lease | None:
        """The lease, if it is this one."""
        lease = self.lease
        return lease if lease is not None and lease.sequence_id == sequence_id else None

    def seat_of(self, sequence_id: int) -> Seat | None:
        """The seat, if it is this one."""
        seat = self.seat
        return seat if seat is not None and seat.sequence_id == sequence_id else None

    def open(self, placement: Placement, num_emitted: int) -> None:
        """Begin anew with the prompt and the output so far; nothing is held."""
        assert self.lease is None
        assert self.seat is None
        self.base = num_emitted
        self.prefill_worker = self.decode_worker = ""
        self.transfer = None
        match placement:
            case Paired():
                self.kv_path = KVPath.KV_PATH_DISAGGREGATED
                self.open_lease(placement.prefill)
                self.reserve(placement.decode)
            case PrefillOnly():
                self.kv_path = KVPath.KV_PATH_PREFILL_ONLY
                self.open_lease(placement.prefill)
            case DecodeOnly():
                self._go_local(placement.why)
                self.reserve(placement.decode, compute=True)

    def open_lease(self, worker: WorkerId) -> None:
        """Ask a prefill worker to compute and hold the prompt."""
        due_s = self._around.clock() + self._around.timers.accept_s
        self.lease = Lease(worker, self._around.new_sequence_id(), due_s)
        self.prefill_worker = worker.address
        self._do(actions.OpenLease(worker, self.lease.sequence_id, self.base))

    def reserve(self, worker: WorkerId, *, compute: bool = False) -> None:
        """Ask a decode worker for a seat; ``compute``: there will be no lease to pull from."""
        due_s = self._around.clock() + self._around.timers.accept_s
        self.seat = Seat(worker, self._around.new_sequence_id(), due_s, compute)
        self.decode_worker = worker.address
        self._do(actions.Reserve(worker, self.seat.sequence_id, self.base))

    def reserved(self, num_cached_tokens: int) -> bool:
        """The seat's blocks are held; this many tokens' KV are there. False: it is known."""
        seat = self.seat
        assert seat is not None
        is_whole = num_cached_tokens >= self._num_prompt_tokens + self.base
        if not seat.move(SeatEvent.RESERVED_WHOLE if is_whole else SeatEvent.RESERVED):
            return False
        seat.num_cached_tokens = num_cached_tokens
        return True

    def grant_if_held(self) -> None:
        """Let the seat pull from the lease, once both are held and something is missing."""
        lease, seat = self.lease, self.seat
        if lease is None or lease.state is LeaseState.OPENING:
            return
        if seat is None or not seat.move(SeatEvent.GRANT):
            return
        lease.grant_id += 1
        lease.ticket = self._around.new_ticket()
        self._do(actions.Grant(lease.sequence_id, lease.grant_id, lease.ticket, seat.worker))

    def bind(self, grant_id: int) -> None:
        """The ticket of that grant is valid: the seat may use it."""
        lease, seat = self.lease, self.seat
        if lease is None or seat is None or lease.grant_id != grant_id:
            return
        if not seat.move(SeatEvent.BIND):
            return
        seat.bind_id += 1
        first = seat.num_cached_tokens
        self._do(actions.Bind(seat.sequence_id, seat.bind_id, lease.worker, lease.ticket, first))

    def start_if_proven(self, output: Sequence[int]) -> bool:
        """Start the proven seat once the lease's token is known, and close the lease."""
        lease, seat = self.lease, self.seat
        if lease is None or lease.state is not LeaseState.SAMPLED:
            return False
        if seat is None or seat.state is not SeatState.PROVEN:
            return False
        self.transfer = seat.stats
        self._start(seat, output, compute=False)
        self.close_lease()
        return True

    def compute_on_seat(self, why: Why, output: Sequence[int]) -> bool:
        """Let the seat compute what it lacks, now or when it is held; True if it runs now."""
        seat = self.seat
        assert seat is not None
        self._go_local(why)
        self.prefill_worker = ""
        self.transfer = seat.stats
        if seat.state is SeatState.RESERVING:
            seat.compute = True
            return False
        self._start(seat, output, compute=True)
        return True

    def start_computing(self, output: Sequence[int]) -> None:
        """The seat is held and computes what it lacks."""
        assert self.seat is not None
        self._start(self.seat, output, compute=True)

    def close(self) -> None:
        """Free both halves."""
        self.close_seat()
        self.close_lease()

    def close_lease(self) -> None:
        """Free the lease, if there is one."""
        if self.lease is not None:
            self._do(actions.CloseLease(self.lease.sequence_id))
            self.drop_lease()

    def close_seat(self) -> None:
        """Free the seat, if there is one."""
        if self.seat is not None:
            self._do(actions.Release(self.seat.sequence_id))
            self.drop_seat()

    def drop_lease(self) -> None:
        """Forget the lease: its worker has, or was told to."""
        if self.lease is not None:
            self.lease.move(LeaseEvent.CLOSE)
            self.lease = None

    def drop_seat(self) -> None:
        """Forget the seat: its worker has, or was told to."""
        if self.seat is not None:
            self.seat.move(SeatEvent.CLOSE)
            self.seat = None

    def _start(self, seat: Seat, output: Sequence[int], *, compute: bool) -> None:
        seat.move(SeatEvent.START)
        self._do(actions.Start(seat.sequence_id, tuple(output[self.base :]), compute))

    def _go_local(self, why: Why) -> None:
        is_recompute = why is Why.RECOMPUTE
        self.kv_path = KVPath.KV_PATH_RECOMPUTED if is_recompute else KVPath.KV_PATH_LOCAL
        self._do(actions.RunLocally(why))

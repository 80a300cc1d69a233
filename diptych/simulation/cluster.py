"""All simulated workers, and one router's placement and waiting room over them. Pure."""

import random
from collections.abc import Callable
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from diptych.block_needs import ShippedBytes
from diptych.simulation.agenda import Agenda
from diptych.simulation.engine import EngineLimits, Noise
from diptych.simulation.seen import DecodeSeen, PrefillSeen, Told
from diptych.simulation.worker import SimulatedWorker
from diptych.step_model import StepModel
from router.cluster.prefill_backlog import PrefillBacklog
from router.placement.departures import Departures
from router.placement.types import DecodeView, Policy, PrefillView, Snapshot, WorkerId
from router.placement.waiting_room import WaitingRoom

_NOISE_APART = 7919  # steps, between the noise of two workers
_PUMP_REST_S = 0.05  # as in the router: before those are asked whom a pump did not reach

S = TypeVar("S", PrefillSeen, DecodeSeen)
V = TypeVar("V", PrefillView, DecodeView)


class Split(NamedTuple):
    """How many workers of each role."""

    num_prefill: int
    num_decode: int

    @property
    def name(self) -> str:
        """As on the command line."""
        parts = [f"prefill={self.num_prefill}"] if self.num_prefill else []
        return ",".join([*parts, f"decode={self.num_decode}"])


class Wires(NamedTuple):
    """What messages and transfers take."""

    message_s: float = 0.001  # one way, between router and worker
    bytes_per_s: float = 1e9  # into one decode worker, of all that it pulls together
    pull_s: float = 0.002  # of a pull, beside its bytes: to begin it, and to prove it
    kv_bytes_per_token: float = 46080.0


class RouterLimits(NamedTuple):
    """The router's settings of the same names."""

    max_queue: int = 256
    max_concurrent: int = 256
    max_pending_prefill_tokens: int = 16384


class Workers(NamedTuple):
    """What all workers of a role have in common."""

    prefill: EngineLimits
    decode: EngineLimits
    model: StepModel
    is_noisy: bool = True
    may_leap: bool = True


class Seat(NamedTuple, Generic[S]):
    """A worker and what the router sees of it."""

    host: SimulatedWorker
    seen: S


class _Views(Generic[V]):
    """The views of one pool; made anew where something changed, when they are looked at."""

    def __init__(self) -> None:
        self._makers: list[Callable[[], V]] = []
        self._views: list[V] = []
        self._stale: set[int] = set()

    def add(self, make: Callable[[], V]) -> None:
        """Of one worker more."""
        self._makers.append(make)
        self._views.append(make())

    def changed(self, index: int) -> None:
        """Of that one."""
        self._stale.add(index)

    def all(self) -> tuple[V, ...]:
        """As of now."""
        for index in self._stale:
            self._views[index] = self._makers[index]()
        self._stale.clear()
        return tuple(self._views)


class SimulatedCluster:
    """One router and its workers; what moves requests asks it for both."""

    def __init__(
        self,
        split: Split,
        workers: Workers,
        wires: Wires,
        limits: RouterLimits,
        policy: Policy,
        agenda: Agenda,
        seed: int,
    ) -> None:
        self.policy = policy
        self.wires = wires
        self.agenda = agenda
        self.block_size = workers.decode.block_size
        self._workers = workers
        self._noise = Noise(seed, is_on=workers.is_noisy)
        self._num_hosts = 0
        self._has_prefill_pool = split.num_prefill > 0
        self._snapshot: Snapshot | None = None
        self._prefill_views = _Views[PrefillView]()
        self._decode_views = _Views[DecodeView]()
        self.backlog = PrefillBacklog(self._backlog_changed)
        self.prefill = self._seat_prefill(split.num_prefill, limits.max_pending_prefill_tokens)
        self.decode = self._seat_decode(split.num_decode)
        self.room = WaitingRoom(
            max_waiting=limits.max_queue,
            max_placed=limits.max_concurrent,
            schedule=agenda.soon,
            schedule_rest=partial(agenda.after, _PUMP_REST_S),
            has_room=lambda: self.snapshot().has_room,
            departures=Departures(lambda: agenda.now_s, random.Random(seed).random),
        )

    @property
    def hosts(self) -> list[SimulatedWorker]:
        """All workers."""
        prefill = [seat.host for seat in self.prefill.values()]
        return [*prefill, *(seat.host for seat in self.decode.values())]

    def snapshot(self) -> Snapshot:
        """What placement may use now."""
        if self._snapshot is None:
            self._snapshot = Snapshot(
                self._prefill_views.all(),
                self._decode_views.all(),
                has_prefill_pool=self._has_prefill_pool,
            )
        return self._snapshot

    def _seat_prefill(self, num: int, max_pending: int) -> dict[WorkerId, Seat[PrefillSeen]]:
        seats = {}
        for index in range(num):
            host = self._host("prefill", index, self._workers.prefill)
            changed = partial(self._changed, self._prefill_views, index)
            seen = PrefillSeen(host.worker, Told(host.engine), max_pending, changed)
            host.on_told = partial(self._prefill_told, seen, host.worker)
            seats[host.worker] = Seat(host, seen)
            self._prefill_views.add(seen.view)
        return seats

    def _seat_decode(self, num: int) -> dict[WorkerId, Seat[DecodeSeen]]:
        sources = {worker.incarnation: self.wires.bytes_per_s for worker in self.prefill}
        seats = {}
        for index in range(num):
            host = self._host("decode", index, self._workers.decode)
            changed = partial(self._changed, self._decode_views, index)
            shipped = ShippedBytes.even(self.wires.kv_bytes_per_token)
            seen = DecodeSeen(host.worker, Told(host.engine), sources, shipped, changed)
            host.on_told = seen.told
            seats[host.worker] = Seat(host, seen)
            self._decode_views.add(seen.view)
        return seats

    def _host(self, role: str, index: int, limits: EngineLimits) -> SimulatedWorker:
        name = f"{role}-{index}"
        self._num_hosts += 1
        host = SimulatedWorker(
            WorkerId(f"{name}:1", name),
            limits,
            self._workers.model,
            self.agenda,
            self._noise,
            first_step=_NOISE_APART * self._num_hosts,
            may_leap=self._workers.may_leap,
        )
        host.on_cached = partial(self.policy.cache.told, host.worker.incarnation)
        host.tell_cache()
        return host

    def _prefill_told(self, seen: PrefillSeen, worker: WorkerId, told: Told) -> None:
        self.backlog.told(worker)
        seen.told(told)

    def _backlog_changed(self, worker: WorkerId) -> None:
        backlog, seen = self.backlog, self.prefill[worker].seen
        seen.loaded(backlog.num_pending_tokens(worker), backlog.num_sent_tokens(worker))

    def _changed(self, views: "_Views[V]", index: int, is_news: bool) -> None:
        views.changed(index)
        self._snapshot = None
        if is_news:
            self.room.pump_soon()

"""One simulated router: what it sees of the workers, its placement and its waiting room. Pure."""

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from diptych.block_needs import ShippedBytes
from diptych.simulation.agenda import Agenda
from diptych.simulation.seen import DecodeSeen, PrefillSeen, Told
from diptych.simulation.worker import SimulatedWorker
from router.cluster.prefill_backlog import PrefillBacklog
from router.placement.departures import Departures
from router.placement.engine_seconds import RecentRates
from router.placement.output_lengths import OutputLengths
from router.placement.policy import Policy
from router.placement.runway import Runway
from router.placement.second_halves import SecondHalves
from router.placement.views import DecodeView, PrefillView, Snapshot, WorkerId
from router.placement.waiting_room import WaitingRoom

S = TypeVar("S", PrefillSeen, DecodeSeen)
V = TypeVar("V", PrefillView, DecodeView)


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
    prefill_runway_s: float = 2.0

    @property
    def runway(self) -> Runway:
        """As the router makes it."""
        return Runway(self.max_pending_prefill_tokens, self.prefill_runway_s)


class Seat(NamedTuple, Generic[S]):
    """A worker and what the router sees of it."""

    host: SimulatedWorker
    seen: S


class _Views(Generic[V]):
    """The views of one pool; made anew where something changed, when they are looked at."""

    def __init__(self) -> None:
        self._makers: dict[WorkerId, Callable[[], V]] = {}
        self._views: dict[WorkerId, V] = {}
        self._stale: set[WorkerId] = set()

    def add(self, worker: WorkerId, make: Callable[[], V]) -> None:
        """Of one worker more."""
        self._makers[worker] = make
        self._views[worker] = make()

    def changed(self, worker: WorkerId) -> None:
        """Of that one, if it is in this pool."""
        if worker in self._makers:
            self._stale.add(worker)

    def all(self) -> tuple[V, ...]:
        """As of now."""
        for worker in self._stale:
            self._views[worker] = self._makers[worker]()
        self._stale.clear()
        return tuple(self._views.values())


class SimulatedRouter:
    """What moves requests asks it for workers; a worker of both roles is in both pools."""

    def __init__(
        self,
        name: str,
        prefill: Sequence[SimulatedWorker],
        decode: Sequence[SimulatedWorker],
        wires: Wires,
        limits: RouterLimits,
        policy: Policy,
        agenda: Agenda,
        seed: int,
    ) -> None:
        """``name``: as workers know it. ``prefill`` and ``decode``: those that compute prompts, and
        those that decode.
        """
        self.name = name
        self.policy = policy
        self.wires = wires
        self.agenda = agenda
        self.place = 0  # among the routers, as workers have it
        self.block_size = decode[0].engine.limits.block_size
        self._snapshot: Snapshot | None = None
        self.rates = RecentRates(lambda: agenda.now_s)
        self.lengths = OutputLengths()
        self.second_halves = SecondHalves(self._forget_snapshot, lambda: self.room.pump_soon())
        self._prefill_views = _Views[PrefillView]()
        self._decode_views = _Views[DecodeView]()
        self.backlog = PrefillBacklog(self._backlog_changed)
        self.prefill: dict[WorkerId, Seat[PrefillSeen]] = {}
        self.decode: dict[WorkerId, Seat[DecodeSeen]] = {}
        for host in prefill:
            self._seat_prefill(host, limits.runway)
        for host in decode:
            self._seat_decode(host)
        for host in {host.worker: host for host in [*prefill, *decode]}.values():
            self.place = host.watch(partial(self._told, host.worker))
            host.on_cached.append(partial(policy.cache.told, host.worker.incarnation))
        self.room = WaitingRoom(
            max_waiting=limits.max_queue,
            max_placed=limits.max_concurrent,
            schedule=agenda.soon,
            schedule_rest=agenda.after,
            has_room=lambda those: self.snapshot().has_room_for(those),
            departures=Departures(lambda: agenda.now_s, random.Random(seed).random),
            clock=lambda: agenda.now_s,
        )

    def snapshot(self) -> Snapshot:
        """What placement may use now."""
        if self._snapshot is None:
            found = Snapshot(
                self._prefill_views.all(),
                self._decode_views.all(),
                has_prefill_pool=bool(self.prefill),
            )
            self._snapshot = self.second_halves.over(found)
        return self._snapshot

    def _forget_snapshot(self) -> None:
        self._snapshot = None

    def _seat_prefill(self, host: SimulatedWorker, runway: Runway) -> None:
        changed = partial(self._changed, host.worker)
        seen = PrefillSeen(host.worker, Told(host.engine), runway, changed)
        self.prefill[host.worker] = Seat(host, seen)
        self._prefill_views.add(host.worker, seen.view)

    def _seat_decode(self, host: SimulatedWorker) -> None:
        sources = {
            worker.incarnation: self.wires.bytes_per_s
            for worker in self.prefill
            if worker != host.worker
        }
        shipped = ShippedBytes.even(self.wires.kv_bytes_per_token)
        changed = partial(self._changed, host.worker)
        seen = DecodeSeen(host.worker, Told(host.engine), sources, shipped, changed, self.name)
        beside = self.prefill.get(host.worker)
        if beside is not None:
            seen.beside, beside.seen.beside = beside.seen, seen
        self.decode[host.worker] = Seat(host, seen)
        self._decode_views.add(host.worker, seen.view)

    def _told(self, worker: WorkerId, told: Told) -> None:
        if worker in self.prefill:
            self.prefill[worker].seen.told(told, self.backlog.told(worker))
        if worker in self.decode:
            self.decode[worker].seen.told(told)

    def _backlog_changed(self, worker: WorkerId) -> None:
        own = self.backlog.own(worker)
        self.prefill[worker].seen.loaded(own, self.agenda.now_s)

    def _changed(self, worker: WorkerId, is_news: bool) -> None:
        self._prefill_views.changed(worker)
        self._decode_views.changed(worker)
        self._snapshot = None
        if is_news:
            self.room.pump_soon()

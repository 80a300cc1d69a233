"""One simulated worker: its engine, its link, and when it tells of itself. Pure."""

from collections.abc import Callable

from diptych.cache_change import CacheChange
from diptych.simulation.agenda import Agenda
from diptych.simulation.engine import EngineLimits, Noise, SimulatedEngine
from diptych.simulation.seen import Told
from diptych.step_model import StepModel
from router.placement.types import WorkerId

_LOAD_GAP_S = 0.25  # between two messages on Watch that tell of load


class SimulatedWorker:
    """Owns an engine. Routers put themselves into ``on_told``, to hear what Watch tells.

    And into ``on_cached``, to hear what WatchCache tells: here, just before that.
    """

    def __init__(
        self,
        worker: WorkerId,
        limits: EngineLimits,
        model: StepModel,
        agenda: Agenda,
        noise: Noise,
        *,
        first_step: int = 0,
        may_leap: bool = True,
    ) -> None:
        """See :class:`SimulatedEngine`."""
        self.worker = worker
        self.on_told: list[Callable[[Told], None]] = []
        self.on_cached: list[Callable[[CacheChange], object]] = []
        self._agenda = agenda
        self._told_s = 0.0
        self._is_due = False
        self._cache_seq: int | None = None  # up to where routers were told
        self._link_free_s = 0.0
        self.engine = SimulatedEngine(
            limits,
            model,
            agenda,
            noise,
            first_step=first_step,
            on_load=self._load_changed,
            may_leap=may_leap,
        )

    def pull(self, num_bytes: float, bytes_per_s: float) -> float:
        """Ask for so many bytes more, behind what was asked for: when the last one is there, s."""
        begin_s = max(self._link_free_s, self._agenda.now_s)
        self._link_free_s = begin_s + num_bytes / bytes_per_s
        return self._link_free_s

    def tell_cache(self) -> None:
        """What became other of it since this was told last."""
        for change in self.engine.pool.cache_log.since(self._cache_seq):
            for hear in self.on_cached:
                hear(change)
            self._cache_seq = change.to_seq

    def _load_changed(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._agenda.at(self._told_s + _LOAD_GAP_S, self._tell)

    def _tell(self) -> None:
        self._is_due = False
        self._told_s = self._agenda.now_s
        self.tell_cache()
        told = Told(self.engine)
        for hear in self.on_told:
            hear(told)

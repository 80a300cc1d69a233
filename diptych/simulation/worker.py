"""One simulated worker: its engine, its link, and when it tells of itself. Pure."""

from collections.abc import Callable

from diptych.cache_change import CacheChange
from diptych.simulation.agenda import Agenda
from diptych.simulation.engine import EngineLimits, SimulatedEngine
from diptych.simulation.noise import Noise
from diptych.simulation.seen import Told
from diptych.step_model import StepModel
from router.placement.views import WorkerId

# Between two messages on Watch that tell of load, which each step changes; of a worker at rest.
_LOAD_GAP_S = 0.25
_LONGEST_GAP_S = 1.0
_LEAST_GAP_S = 0.02  # where another router's work came
_HARDLY = 0.001  # of its time: a worker at rest has nothing else to tell


class _Stream:
    """What one router hears on Watch, and when it heard last."""

    def __init__(self, hear: Callable[[Told], None]) -> None:
        self.hear = hear
        self.told_s = 0.0
        self.due_s: float | None = None  # when it is told next; None: nothing is to be told


class SimulatedWorker:
    """Owns an engine. Routers ``watch`` it, to hear what Watch tells.

    And put themselves into ``on_cached``, to hear what WatchCache tells: here, just before that.
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
        self._streams: list[_Stream] = []
        self.on_cached: list[Callable[[CacheChange], object]] = []
        self._agenda = agenda
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

    def watch(self, hear: Callable[[Told], None]) -> int:
        """Let a router ``hear`` what is told; its place among those that watch."""
        self._streams.append(_Stream(hear))
        return len(self._streams) - 1

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

    def work_came(self, router: int) -> None:
        """Of the one that watched at that place; the others hear of it sooner."""
        for place, stream in enumerate(self._streams):
            if place != router:
                self._tell_soon(stream, _LEAST_GAP_S)

    def _load_changed(self) -> None:
        for stream in self._streams:
            self._tell_soon(stream, _LOAD_GAP_S)

    def _tell_soon(self, stream: _Stream, gap_s: float) -> None:
        due_s = max(self._agenda.now_s, stream.told_s + gap_s)
        if stream.due_s is None or due_s < stream.due_s:
            stream.due_s = due_s
            self._agenda.at(stream.told_s + gap_s, lambda: self._tell(stream, due_s))

    def _tell(self, stream: _Stream, due_s: float) -> None:
        if stream.due_s != due_s:
            return  # it was told sooner
        stream.due_s = None
        stream.told_s = self._agenda.now_s
        self.tell_cache()
        stream.hear(Told(self.engine))
        if self.engine.is_stepping:
            self._tell_soon(stream, _LOAD_GAP_S)
        elif self.engine.prefill_time_ratio > _HARDLY:
            self._tell_soon(stream, _LONGEST_GAP_S)

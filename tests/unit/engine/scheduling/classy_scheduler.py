"""The scheduler, which looks whom it preempts: those that give way come first."""

from diptych.engine.scheduling.scheduler import Scheduler
from diptych.engine.scheduling.sequence import Sequence


class ClassyScheduler(Scheduler):
    """Looks whom it preempts."""

    def start(self, seq: Sequence, emitted: list[int], compute_missing: bool) -> None:
        self._starting = seq
        super().start(seq, emitted, compute_missing)
        self._starting = None

    def _preempt(self, seq: Sequence) -> None:
        if not seq.gives_way and seq is not self._starting:
            assert not self._queues.giving_way(), "one that gives way kept its blocks"
        super()._preempt(seq)

    _starting: Sequence | None = None

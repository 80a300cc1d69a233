"""The time between tokens that sequences of ours were promised, by worker. Pure."""

from collections import Counter

from router.placement.loss import NOTHING_PROMISED, Promised
from router.placement.types import WorkerId


class Promises:
    """Of each sequence that runs: it is counted from being placed until it has ended."""

    def __init__(self) -> None:
        self._paces: dict[WorkerId, Counter[float | None]] = {}
        self._promised: dict[WorkerId, Promised] = {}  # what these come to

    def on(self, worker: WorkerId) -> Promised:
        """All of one worker."""
        return self._promised.get(worker, NOTHING_PROMISED)

    def began(self, worker: WorkerId, tpot_s: float | None) -> None:
        """One more runs there; None: it was promised none."""
        paces = self._paces.setdefault(worker, Counter())
        paces[tpot_s] += 1
        self._promised[worker] = _sum(paces)

    def ended(self, worker: WorkerId, tpot_s: float | None) -> None:
        """One of these runs no more; of a worker that was forgotten none did."""
        paces = self._paces.get(worker)
        if paces is None or not paces[tpot_s]:
            return
        paces[tpot_s] -= 1
        if not paces[tpot_s]:
            del paces[tpot_s]
        self._promised[worker] = _sum(paces)
        if not paces:
            del self._paces[worker], self._promised[worker]

    def forget(self, worker: WorkerId) -> None:
        """It is gone, with all that ran there."""
        self._paces.pop(worker, None)
        self._promised.pop(worker, None)


def _sum(paces: Counter[float | None]) -> Promised:
    paced = {pace_s: num for pace_s, num in paces.items() if pace_s is not None}
    return Promised(paces.total(), sum(paced.values()), min(paced, default=0.0))

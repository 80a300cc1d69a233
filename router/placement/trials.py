"""Whom to place though its objectives look lost: who refuses all learns nothing. Pure.

A forecast that is wrong is corrected by what comes of placements. So one is placed where many were
refused in a row; and a worker that has been idle while many were refused gets one, too, whatever
others do: its steps may look slow for what the machine did once.
"""

from collections import Counter
from collections.abc import Collection
from typing import Final

from router.placement.types import Snapshot, WorkerId

_AFTER: Final = 16  # refusals


class Trials:
    """Of one router. Hears of each refusal and each placement."""

    def __init__(self) -> None:
        self._num_in_row = 0  # since one was placed or a first token came
        self._num_while_idle: Counter[WorkerId] = Counter()  # since one was placed there

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone."""
        self._num_while_idle.pop(worker, None)

    def refused(self, snapshot: Snapshot) -> None:
        """One was."""
        self._num_in_row += 1
        for view in snapshot.decode:
            if not view.num_sequences:
                self._num_while_idle[view.worker] += 1

    def placed(self, *workers: WorkerId | None) -> None:
        """One was, on these."""
        self._num_in_row = 0
        for worker in workers:
            if worker is not None:
                self.forget(worker)

    def came(self) -> None:
        """A first token did."""
        self._num_in_row = 0

    @property
    def is_due(self) -> bool:
        """Whether one is to be placed, wherever it loses least."""
        return self._num_in_row >= _AFTER

    @property
    def due(self) -> Collection[WorkerId]:
        """On which of them, if it is to be one of these."""
        return {worker for worker, num in self._num_while_idle.items() if num >= _AFTER}

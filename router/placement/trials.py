"""Whom to place though its objectives look lost: who refuses all learns nothing. Pure.

A forecast that is wrong is corrected by what comes of placements. So one is placed where many were
refused in a row; and one on a worker that was idle while many were refused, and that looked too
slow for each of them, whatever others do: its steps may look slow for what the machine did once.
"""

from collections import Counter
from collections.abc import Collection
from typing import Final

from router.placement.types import WorkerId

_AFTER: Final = 16  # refusals


class Trials:
    """Of one router. Hears of each refusal and each placement."""

    def __init__(self) -> None:
        self._num_in_row = 0  # since one was placed or a first token came
        self._num_while_idle: Counter[WorkerId] = Counter()  # since one was placed there

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone."""
        self._num_while_idle.pop(worker, None)

    def refused(self, slow: Collection[WorkerId], busy: Collection[WorkerId]) -> None:
        """One was; ``slow`` are idle and would have missed its pace, ``busy`` are not idle."""
        self._num_in_row += 1
        self._num_while_idle.update(slow)
        for worker in busy:
            self.forget(worker)

    def placed(self, *workers: WorkerId | None) -> None:
        """One was, on these."""
        self._num_in_row = 0
        for worker in workers:
            if worker is not None:
                self.forget(worker)

    def tried(self) -> None:
        """One was placed so: the next is far off, also on other workers."""
        self._num_in_row = 0
        self._num_while_idle.clear()

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

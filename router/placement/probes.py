"""Whom to place though its objectives look lost: who refuses all learns nothing. Pure.

A forecast that is wrong is corrected by what comes of placements. So one is placed where many were
refused in a row; and one on a worker that was idle while many were refused, and that looked too
slow for each of them, whatever others do: its steps may look slow for what the machine did once.
And one on idle workers of which nothing has come yet: what they timed before they were ready may
have been slowed by all that starts with them.
"""

from collections import Counter
from collections.abc import Collection
from typing import Final

from router.placement.types import Objectives, Outlook, WorkerId

_AFTER: Final = 16  # refusals
_MOST_SLOWED: Final = 2.0  # times, that what a worker timed at its start is taken for


class Probes:
    """Of one router. Hears of each refusal, each placement and each first token."""

    def __init__(self) -> None:
        self._num_in_row = 0  # refusals since one was placed or a first token came
        self._num_while_idle: Counter[WorkerId] = Counter()  # since one was placed there
        self._served: set[WorkerId] = set()  # a first token came from there

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone."""
        self._num_while_idle.pop(worker, None)
        self._served.discard(worker)

    def refused(self, slow: Collection[WorkerId], busy: Collection[WorkerId]) -> None:
        """One was; ``slow`` are idle and would have missed its pace, ``busy`` are not idle."""
        self._num_in_row += 1
        self._num_while_idle.update(slow)
        for worker in busy:
            self._num_while_idle.pop(worker, None)

    def placed(self, *workers: WorkerId | None) -> None:
        """One was, on these."""
        self._num_in_row = 0
        for worker in workers:
            if worker is not None:
                self._num_while_idle.pop(worker, None)

    def probed(self) -> None:
        """One was placed so: the next is far off, also on other workers."""
        self._num_in_row = 0
        self._num_while_idle.clear()

    def came(self, *workers: WorkerId | None) -> None:
        """A first token did, from these."""
        self._num_in_row = 0
        self._served.update(worker for worker in workers if worker is not None)

    @property
    def is_due(self) -> bool:
        """Whether one is to be placed, wherever it loses least."""
        return self._num_in_row >= _AFTER

    @property
    def due(self) -> Collection[WorkerId]:
        """On which of them, if it is to be one of these."""
        return {worker for worker, num in self._num_while_idle.items() if num >= _AFTER}

    def is_first(
        self, outlook: Outlook, objectives: Objectives, busy: Collection[WorkerId]
    ) -> bool:
        """Whether its workers look too slow by what one timed before it was ready, and no more.

        Nothing came yet from one of them, none is busy, and half of what is foretold would do.
        """
        workers = {outlook.decode, outlook.prefill or outlook.decode}
        if workers <= self._served or not workers.isdisjoint(busy):
            return False
        foretold_s = outlook.ttft_s, outlook.tpot_s
        if objectives.kept_by(*foretold_s):
            return False
        return objectives.kept_by(*(each_s / _MOST_SLOWED for each_s in foretold_s))

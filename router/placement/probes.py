"""Whom to place though its objectives look lost: who refuses all learns nothing. Pure.

A forecast that is wrong is corrected by what comes of placements. So one is placed where many were
refused in a row; and one on a worker that was idle while many were refused, and that looked too
slow for each of them, whatever others do: its steps may look slow for what the machine did once.
And whoever is expected to be in time on idle workers, however likely it is not: it can only get
worse. What workers timed that computed hardly anything for anybody yet may have been slowed by all
that starts with them.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Final, TypeVar

from diptych.step_model import StepCost, StepModel
from router.placement.placement import Outlook
from router.placement.query import Query
from router.placement.views import DecodeView, PrefillView, Snapshot, WorkerId

L = TypeVar("L")

_AFTER: Final = 16  # refusals
_MOST_SLOWED: Final = 2.0  # times, by what starts beside a worker


class Probes:
    """Of one router. Hears of each refusal, each placement and each first token."""

    def __init__(self) -> None:
        self._num_in_row = 0  # refusals since one was placed or a first token came
        self._num_while_idle: Counter[WorkerId] = Counter()  # since one was placed there

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone."""
        self._num_while_idle.pop(worker, None)

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


def most_slowed(*views: PrefillView | DecodeView) -> float:
    """How many times too long it may be what these foretell, as one of them is new."""
    models = (view.engine.model for view in views if view.engine is not None)
    return _MOST_SLOWED if any(model.is_doubted for model in models) else 1.0


def perhaps_in_time(
    idle: Iterable[tuple[L, Outlook]],
    query: Query,
    snapshot: Snapshot,
    overhead_s: float,
) -> list[tuple[L, Outlook]]:
    """Of those on ``idle`` workers that more is lost by than kept the ones that are expected to be
    in time: nothing there will be better later.

    Who computed hardly anything for requests yet may have timed up to twice what it takes.
    ``overhead_s`` of first tokens no worker timed.
    """
    models = _models(snapshot)
    doubted = {worker for worker, model in models.items() if model.is_doubted}

    def is_in_time(outlook: Outlook) -> bool:
        computing, decoding = outlook.prefill or outlook.decode, outlook.decode
        of_prompt = _MOST_SLOWED if _is_own(models[computing].prefill, computing, doubted) else 1.0
        of_token = _MOST_SLOWED if _is_own(models[decoding].decode, decoding, doubted) else 1.0
        ttft_s = overhead_s + (outlook.ttft_s - overhead_s) / of_prompt
        handoff_s = max(0.0, outlook.gap_s - outlook.tpot_s) / max(1, query.num_answer_tokens - 1)
        return query.objectives.kept_by(ttft_s, outlook.tpot_s / of_token + handoff_s)

    return [each for each in idle if is_in_time(each[1])]


def _is_own(cost: StepCost, worker: WorkerId, doubted: Collection[WorkerId]) -> bool:
    """Whether a doubted worker is judged by its own cost, as it knows one."""
    return worker in doubted and cost.is_known


def _models(snapshot: Snapshot) -> dict[WorkerId, StepModel]:
    views: tuple[PrefillView | DecodeView, ...] = (*snapshot.prefill, *snapshot.decode)
    models = {view.worker: StepModel() for view in views}
    return models | {view.worker: view.engine.model for view in views if view.engine is not None}

"""Ends a call whose peer is lost. asyncio shell around :class:`.liveness.Liveness`."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from router.cluster.liveness import Liveness


class Watchdog:
    """While entered, checks ``liveness`` on a timer and cancels the call once its peer is lost.

    A locally cancelled call raises CancelledError in its reader; ``is_lost``
    then tells a lost peer from a cancelled task. ``on_check`` runs at each check.
    """

    def __init__(
        self,
        liveness: Liveness,
        cancel: Callable[[], object],
        on_check: Callable[[], str | None] | None = None,
    ) -> None:
        """``on_check`` may return another reason to give up."""
        self.reason: str | None = None
        self._liveness = liveness
        self._cancel = cancel
        self._on_check = on_check
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_lost(self) -> bool:
        """Whether a CancelledError just caught means a lost peer, and not a cancelled task."""
        task = asyncio.current_task()
        return self.reason is not None and (task is None or not task.cancelling())

    def __enter__(self) -> Self:
        self._schedule()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _schedule(self) -> None:
        self._timer = self._loop.call_later(self._liveness.check_every_s, self._check)

    def _check(self) -> None:
        self.reason = self._liveness.problem(self._loop.time())
        if self.reason is None and self._on_check is not None:
            self.reason = self._on_check()
        if self.reason is None:
            self._schedule()
        else:
            self._cancel()

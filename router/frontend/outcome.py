"""How a request ended, for its record."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from diptych.errors import (
    BlocksExhaustedError,
    DeadlineExceededError,
    DeadlineUnreachableError,
    DiptychError,
    NoWorkerError,
    QueueFullError,
    QueueTimeoutError,
    WorkerDrainingError,
)

# A client tells how long it will wait: its deadline passes before ours by what its request took
# to come, and it hangs up then.
_TRIP_S = 0.1

NO_ROOM: Final = frozenset(
    {
        BlocksExhaustedError.reason,
        DeadlineUnreachableError.reason,
        NoWorkerError.reason,
        QueueFullError.reason,
        QueueTimeoutError.reason,
        WorkerDrainingError.reason,
    }
)
"""Ends of a request with which nothing is wrong, but that the cluster has no room for now: who
comes again as it is told to is not to pay for each time. What is wrong with itself pays."""


@contextmanager
def telling_outcome(
    tell: Callable[[str], None],
    deadline_s: float | None,
    is_cut_off: Callable[[], bool],
) -> Iterator[None]:
    """Tell how the block ended, once: ok, cancelled, or the error's reason.

    ``deadline_s`` is a moment of the monotonic clock; who leaves about then left because of it.
    ``is_cut_off``: it is the router that ends what is cancelled now, and says WORKER_DRAINING.
    """
    outcome = "INTERNAL"
    try:
        yield
        outcome = "ok"
    except (asyncio.CancelledError, GeneratorExit):
        is_late = deadline_s is not None and time.monotonic() >= deadline_s - _TRIP_S
        outcome = DeadlineExceededError.reason if is_late else "cancelled"
        if is_cut_off():
            outcome = WorkerDrainingError.reason
        raise
    except DiptychError as error:
        outcome = error.reason
        raise
    finally:
        tell(outcome)

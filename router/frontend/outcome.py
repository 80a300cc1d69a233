"""How a request ended, for its record."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from diptych.errors import DeadlineExceededError, DiptychError

_CLOCK_ERROR_S = 0.001  # gRPC tells a deadline in ms


@contextmanager
def telling_outcome(tell: Callable[[str], None], deadline_s: float | None) -> Iterator[None]:
    """Tell how the block ended, once: ok, cancelled, or the error's reason.

    ``deadline_s`` is a moment of the monotonic clock.
    """
    outcome = "INTERNAL"
    try:
        yield
        outcome = "ok"
    except (asyncio.CancelledError, GeneratorExit):
        is_late = deadline_s is not None and time.monotonic() >= deadline_s - _CLOCK_ERROR_S
        outcome = DeadlineExceededError.reason if is_late else "cancelled"
        raise
    except DiptychError as error:
        outcome = error.reason
        raise
    finally:
        tell(outcome)

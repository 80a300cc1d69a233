"""How a request ended, for its record."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from diptych.errors import DeadlineExceededError, DiptychError

# A client tells how long it will wait: its deadline passes before ours by what its request took
# to come, and it hangs up then.
_TRIP_S = 0.1


@contextmanager
def telling_outcome(tell: Callable[[str], None], deadline_s: float | None) -> Iterator[None]:
    """Tell how the block ended, once: ok, cancelled, or the error's reason.

    ``deadline_s`` is a moment of the monotonic clock; who leaves about then left because of it.
    """
    outcome = "INTERNAL"
    try:
        yield
        outcome = "ok"
    except (asyncio.CancelledError, GeneratorExit):
        is_late = deadline_s is not None and time.monotonic() >= deadline_s - _TRIP_S
        outcome = DeadlineExceededError.reason if is_late else "cancelled"
        raise
    except DiptychError as error:
        outcome = error.reason
        raise
    finally:
        tell(outcome)

"""Whether a failed call is made again, and when. Pure: time and chance are passed in."""

import random
import time
from collections.abc import Callable

import grpc

from diptych.errors import DiptychError, TransferInterruptedError

_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 2.0
_MAX_HINT_S = 30.0  # who is told to wait for longer decides that itself
_MAX_LEFT_S = 1e9  # gRPC takes ten times as much for a deadline that has passed
_MAX_STILL_PAUSE_S = 30.0
_MAX_STILL_S = 3600.0


def may_heal(error: DiptychError) -> bool:
    """Whether the same request may succeed later, or on another router.

    What is full says when to come back; what was never answered for has no reason but its
    code: of a lost connection, or of a call that met the end of its server (gRPC says CANCELLED,
    as of one that the client itself ended, which gets here as no error).
    """
    if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return error.retry_after_s is not None
    met_the_end = error.code is grpc.StatusCode.CANCELLED
    is_gone = error.code is grpc.StatusCode.UNAVAILABLE or met_the_end
    return is_gone or isinstance(error, TransferInterruptedError)


class Retries:
    """The tries that one request has, and its deadline. Owned by whoever makes its calls."""

    def __init__(
        self,
        max_retries: int,
        timeout_s: float | None,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """``max_retries`` bounds those in a row that bring nothing; ``draw`` gives 0 to 1."""
        self._max_retries = max_retries
        self._clock = clock
        self._draw = draw
        self._deadline_s = None if timeout_s is None else clock() + timeout_s
        self._num_failed = 0

    @property
    def left_s(self) -> float | None:
        """Until the deadline; None: there is none."""
        if self._deadline_s is None:
            return None
        return min(max(0.0, self._deadline_s - self._clock()), _MAX_LEFT_S)

    def renew(self) -> None:
        """A call brought something before it failed."""
        self._num_failed = 0

    def pause_s(self, error: DiptychError) -> float | None:
        """How long to wait before the next call, s; None: there is none.

        The pause grows twofold, and half of it is drawn, so that not all come back at once.
        It comes on top of what the router asks for.
        """
        if self._num_failed >= self._max_retries or not may_heal(error):
            return None
        hint_s = error.retry_after_s or 0.0
        longest_s = min(_FIRST_PAUSE_S * 2.0 ** min(self._num_failed, 30), _MAX_PAUSE_S)
        pause_s = hint_s + longest_s * (1 + self._draw()) / 2
        left_s = self.left_s
        if hint_s > _MAX_HINT_S or (left_s is not None and pause_s >= left_s):
            return None
        self._num_failed += 1
        return pause_s


class WatchRetries:
    """The calls of one watch, each of which says first how things are. Owned by who makes them.

    What a call brings proves that its server is there, and nothing more: only what is new lets
    the next pause be short again.
    """

    def __init__(
        self,
        max_retries: int,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """``max_retries`` bounds those in a row that bring nothing; ``draw`` gives 0 to 1.

        Those that bring nothing new end an hour after the first of them failed.
        """
        self._silent = Retries(max_retries, None, clock, draw)
        self._clock = clock
        self._draw = draw
        self.num_still = 0  # calls that failed since there was something new
        self._still_since_s = 0.0

    @property
    def still_s(self) -> float:
        """Since the first call failed of those that brought nothing new."""
        return self._clock() - self._still_since_s if self.num_still else 0.0

    @property
    def is_still_for_good(self) -> bool:
        """Whether there was nothing new for so long that no further call is made."""
        return self.still_s >= _MAX_STILL_S

    def came(self, *, is_new: bool) -> None:
        """A call brought something."""
        self._silent.renew()
        if is_new:
            self.num_still = 0

    def pause_s(self, error: DiptychError) -> float | None:
        """How long to wait before the next call, s; None: there is none."""
        pause_s = self._silent.pause_s(error)
        if self.num_still == 0:
            self._still_since_s = self._clock()
        longest_s = min(_FIRST_PAUSE_S * 2.0 ** min(self.num_still, 30), _MAX_STILL_PAUSE_S)
        self.num_still += 1
        if pause_s is None or self.is_still_for_good:
            return None
        return max(pause_s, longest_s * (1 + self._draw()) / 2)

"""How much of answers waits for clients, and who is cut off where that is too much: the log names
each. Pure.

As in a switch with a shared buffer nobody has a share of it, and who holds most for longest drops.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

logger = logging.getLogger(__name__)

DEFAULT_BYTES: Final = 2**29
SLOW_S: Final = 15.0
PORTION_BYTES: Final = 65_536
"""Who takes so much in ``SLOW_S``, or all that there is, is not slow.

Systems tell what a client took in lumps, of 150 KB with their usual buffers: so who reads on is
safe with 192 KiB in that time, or 13 kB/s, a phone's worst network.
"""

_SLOW_RATIO: Final = 4  # all that may wait, to what may while somebody is slow
_LOOK_S: Final = 0.1  # who is slow is looked for ten times a second at most

End = Callable[[str], None]
"""Ends what waits for a client, whose error says why."""


class Cut(NamedTuple):
    """A client that was cut off."""

    client: str
    request_id: str
    num_bytes: int
    """That waited for it."""
    since_s: float
    """How long it has taken less than a portion."""


class Taker:
    """One client, or one call of one: what waits for it. Made by ``Untaken``; used by its owner.

    Invariant: what ``wait`` added ``take`` takes off, however it ends.
    """

    __slots__ = (
        "_end",
        "_ends",
        "_look",
        "_num_taken",
        "_untaken",
        "client",
        "num_bytes",
        "request_id",
        "since_s",
        "was_cut",
    )

    def __init__(self, untaken: "Untaken", client: str, look: Callable[[], None], end: End) -> None:
        self.client = client
        self.request_id = ""
        """These two are for the log."""
        self.was_cut = False
        self.num_bytes = 0
        self.since_s = 0.0  # when a portion was last taken, or the first byte began to wait
        self._untaken = untaken
        self._look = look
        self._end = end
        self._ends: list[End] = []
        self._num_taken = 0  # of the next portion

    @contextmanager
    def ending_by(self, end: End) -> Iterator[None]:
        """Whoever is cut off within the block ends by ``end``, and by what it has otherwise not."""
        self._ends.append(end)
        try:
            yield
        finally:
            self._ends.remove(end)

    def wait(self, num_bytes: int) -> None:
        """So many more bytes wait. May cut off any client, this one too."""
        if num_bytes and not self.was_cut:
            if not self.num_bytes:
                self._begin()
            self.num_bytes += num_bytes
            self._untaken.added(self, num_bytes)

    def take(self, num_bytes: int) -> None:
        """So many were taken, or wait no longer."""
        if self.was_cut:
            return
        assert num_bytes <= self.num_bytes, "more was taken than there was"
        self.num_bytes -= num_bytes
        self._num_taken += num_bytes
        self._untaken.removed(self, num_bytes)
        if self._num_taken >= PORTION_BYTES:
            self._begin()

    def leave(self) -> None:
        """Nothing waits any more. Idempotent."""
        self.take(self.num_bytes)

    def look(self) -> None:
        """Have ``take`` called for what was taken and not told yet."""
        self._look()

    def cut(self, why: str) -> None:
        """Nothing of it is to wait any more, nor to come. For ``Untaken``."""
        self.leave()
        self.was_cut = True
        for end in tuple(self._ends) or (self._end,):
            end(why)

    def _begin(self) -> None:
        self.since_s = self._untaken.clock()
        self._num_taken = 0


class Untaken:
    """Owns how many bytes wait for all clients together. Event loop only.

    Invariant: once ``Taker.wait`` returns no more than ``max_bytes`` wait; and no more than a
    quarter of that while anybody is slow, as far as it was looked.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        max_bytes: int = DEFAULT_BYTES,
        on_cut: Callable[[Cut], None] = lambda cut: None,
    ) -> None:
        """``on_cut`` counts each that is cut off, before it ends."""
        self.clock = clock
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._max_slow_bytes = max_bytes // _SLOW_RATIO
        self._on_cut = on_cut
        self._waiting: dict[Taker, None] = {}
        self._look_at_s = -math.inf

    def open(
        self,
        client: str = "",
        look: Callable[[], None] = lambda: None,
        end: End = lambda why: None,
    ) -> Taker:
        """For one more client, who ``leave``s. ``look`` has what it took told."""
        return Taker(self, client, look, end)

    def added(self, taker: Taker, num_bytes: int) -> None:
        """See ``Taker.wait``, which alone calls this."""
        self._waiting[taker] = None
        self.num_bytes += num_bytes
        if self.num_bytes <= self._max_slow_bytes:
            return
        if self.num_bytes > self._max_bytes or self.clock() >= self._look_at_s:
            self._make_room()

    def removed(self, taker: Taker, num_bytes: int) -> None:
        """See ``Taker.take``, which alone calls this."""
        self.num_bytes -= num_bytes
        if not taker.num_bytes:
            self._waiting.pop(taker, None)

    def _make_room(self) -> None:
        """Cut off the slow ones until enough is left, and others only if that does not help."""
        for taker in tuple(self._waiting):
            taker.look()
        now = self.clock()
        self._look_at_s = now + _LOOK_S

        def rank(taker: Taker) -> tuple[bool, float, int]:
            waited_s = now - taker.since_s
            return waited_s >= SLOW_S, taker.num_bytes * waited_s, taker.num_bytes

        for taker in sorted(self._waiting, key=rank, reverse=True):
            is_slow, *_ = rank(taker)
            if self.num_bytes <= (self._max_slow_bytes if is_slow else self._max_bytes):
                return
            self._cut(taker, now)

    def _cut(self, taker: Taker, now: float) -> None:
        cut = Cut(taker.client, taker.request_id, taker.num_bytes, now - taker.since_s)
        self._on_cut(cut)
        why = "a client was cut off: too much waited for all to take it"
        logger.warning(why, extra=cut._asdict())
        taker.cut(f"{cut.num_bytes} bytes waited for the client, of all who wait the slowest")

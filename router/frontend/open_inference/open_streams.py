"""Which streams are open, and whose place goes to who comes when there is none left."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from diptych.errors import RETRY_LATER_S, QueueFullError
from diptych.tenant import Tenant


class Stream(Protocol):
    """One that is open."""

    @property
    def idle_since_s(self) -> float | None:
        """When its last request was answered, on the loop's clock; None: one is open."""
        ...

    def make_room(self) -> None:
        """End it, which is idle."""
        ...


class OpenStreams:
    """Owns the count of streams. Event loop only.

    Invariant: a stream that asks nothing keeps nobody out whose tenant holds fewer.
    """

    def __init__(self, most: int) -> None:
        self._most: Final = most
        self._open: dict[Stream, str] = {}

    @contextmanager
    def place(self, stream: Stream, tenant: Tenant) -> Iterator[None]:
        """One for ``stream``, if need be another's. Raises QueueFullError."""
        if len(self._open) >= self._most:
            self._make_room(tenant.name)
        self._open[stream] = tenant.name
        try:
            yield
        finally:
            self._open.pop(stream, None)

    def _make_room(self, tenant: str) -> None:
        """The idlest stream of who holds most ends."""
        held = Counter(self._open.values())
        ending: Stream | None = None
        rank = (0, 0.0)
        for stream, holder in self._open.items():
            since_s = stream.idle_since_s
            if since_s is None or held[holder] <= held[tenant]:
                continue
            if ending is None or (held[holder], -since_s) > rank:
                ending, rank = stream, (held[holder], -since_s)
        if ending is None:
            raise QueueFullError(f"{len(self._open)} streams are open", retry_after_s=RETRY_LATER_S)
        del self._open[ending]  # its place is given away before its task has ended
        ending.make_room()

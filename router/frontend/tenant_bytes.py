"""Bytes in a room that tenants share. Pure.

A tenant may hold as much as it leaves free, so that one alone fills half, and others have room
(Choudhury and Hahne's dynamic thresholds).
"""

from collections import Counter
from collections.abc import Callable

from diptych.errors import RETRY_LATER_S, QueueFullError


class TenantBytes:
    """Owns how many bytes there are, and whose. Event loop only.

    Of each piece the first ``free_bytes`` need no room; how many pieces there are is bounded
    elsewhere. Invariant: what ``hold`` counted counts until it is released.
    """

    def __init__(self, max_bytes: int, free_bytes: int, what: str) -> None:
        """``what`` they are, for people, with their number: "requests of {} bytes are open"."""
        self._max_bytes = max_bytes
        self._free_bytes = free_bytes
        self._what = what
        self._held: Counter[str] = Counter()
        self.num_bytes = 0

    def admit(self, tenant: str) -> None:
        """Before there is a piece, whose size nobody knows yet.

        Raises QueueFullError: the tenant holds as many as are free.
        """
        if self._held[tenant] >= self._max_bytes - self.num_bytes:
            raise self._full()

    def admit_piece(self, tenant: str, num_bytes: int) -> None:
        """Before a piece of so many. Raises QueueFullError, but not for one that needs no room."""
        num = self._counted(num_bytes)
        if num:
            self.admit(tenant)
        if num > self._max_bytes - self.num_bytes:
            raise self._full()

    def hold(self, tenant: str, num_bytes: int) -> Callable[[], None]:
        """Count a piece of so many; call what is returned once it is gone."""
        num = self._counted(num_bytes)
        self._held[tenant] += num
        self.num_bytes += num

        def release() -> None:
            self.num_bytes -= num
            self._held[tenant] -= num
            if not self._held[tenant]:
                del self._held[tenant]

        return release

    def _counted(self, num_bytes: int) -> int:
        return max(0, num_bytes - self._free_bytes)

    def _full(self) -> QueueFullError:
        return QueueFullError(self._what.format(self.num_bytes), retry_after_s=RETRY_LATER_S)

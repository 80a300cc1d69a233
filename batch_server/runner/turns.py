"""Whose line is next, of all that wait for a place. Pure."""

from collections import deque
from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar

W = TypeVar("W")


class LineOwner(NamedTuple):
    """Whose line it is."""

    tenant: str
    batch_id: str


class Turns(Generic[W]):
    """Those who wait, ordered by whose turn it is: tenants first, then the batches of each.

    The tenant that holds fewest places is next, of several the one that has waited longest since
    it came or last got one; its batches go round, and lines of a batch are in order.

    Invariant: who does not wait is not kept; neither are batches and tenants without lines.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, dict[str, deque[W]]] = {}  # the next of each is the first

    def __bool__(self) -> bool:
        """Whether anybody waits."""
        return bool(self._tenants)

    def add(self, owner: LineOwner, waiter: W) -> None:
        """It waits from now on."""
        batches = self._tenants.setdefault(owner.tenant, {})
        batches.setdefault(owner.batch_id, deque()).append(waiter)

    def remove(self, owner: LineOwner, waiter: W) -> None:
        """One that waits does so no longer; nobody else's turn changes."""
        batches = self._tenants[owner.tenant]
        lines = batches[owner.batch_id]
        lines.remove(waiter)
        if not lines:
            del batches[owner.batch_id]
        if not batches:
            del self._tenants[owner.tenant]

    def take(self, num_held: Mapping[str, int]) -> tuple[LineOwner, W]:
        """The next, which waits no longer; ``num_held``: places by tenant. Somebody waits."""
        tenant = min(self._tenants, key=lambda name: num_held.get(name, 0))
        batches = self._tenants.pop(tenant)
        batch_id = next(iter(batches))
        lines = batches.pop(batch_id)
        waiter = lines.popleft()
        if lines:
            batches[batch_id] = lines
        if batches:
            self._tenants[tenant] = batches
        return LineOwner(tenant, batch_id), waiter

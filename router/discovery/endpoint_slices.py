"""Which workers the EndpointSlices of some services name, after each list and each event. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from router.discovery.source import Targets
from router.placement.place import Place


class Endpoint(NamedTuple):
    """One pod of a service, as a slice says: of some services every pod is ready, always."""

    address: str
    is_ready: bool
    is_terminating: bool
    zone: str = ""  # empty: not known


class Slice(NamedTuple):
    """What a slice says. A service may have several; an endpoint may be in two for a moment."""

    name: str
    service: str
    port: int | None  # None: it has not the port that was asked for
    endpoints: tuple[Endpoint, ...]

    @property
    def is_ipv6(self) -> bool:
        """A slice has addresses of one family. Where it has none there is no answer."""
        return ":" in self.endpoints[0].address


class EndpointSet:
    """The set that all slices together name. Owned by the discovery.

    An endpoint that is not ready is not used; one that is used and terminates is, until it is
    gone, so that it can end what it runs. A slice that was deleted counts until the next list,
    but for addresses of which another slice of its service speaks: its endpoints may have
    moved there, and when a Service is made anew all its slices are gone for a moment, one after
    the other, while its pods run on.
    """

    def __init__(self, *, prefill: Sequence[str], decode: Sequence[str]) -> None:
        """The services of the two pools, by name."""
        self._prefill, self._decode = frozenset(prefill), frozenset(decode)
        self._slices: dict[str, Slice] = {}
        self._deleted: dict[str, Slice] = {}  # since the last list
        self._ipv4: set[str] = set()  # services that had such addresses since the last list
        self._targets = Targets(has_prefill_pool=bool(prefill))

    @property
    def targets(self) -> Targets:
        """The set as known now."""
        return self._targets

    def listed(self, slices: Iterable[Slice]) -> None:
        """These are all that there are."""
        self._slices = {each.name: each for each in slices}
        self._deleted.clear()
        self._ipv4.clear()
        self._name()

    def changed(self, known: Slice) -> None:
        """It is there, new or not."""
        self._slices[known.name] = known
        self._deleted.pop(known.name, None)
        self._name()

    def deleted(self, name: str) -> None:
        """It is there no more. Idempotent."""
        known = self._slices.pop(name, None)
        if known is not None:
            self._deleted[name] = known
            self._name()

    def _name(self) -> None:
        before = self._targets
        filled = [known for known in self._all() if known.endpoints]
        self._ipv4 |= {known.service for known in filled if not known.is_ipv6}
        prefill = self._used(self._prefill, before.prefill)
        decode = self._used(self._decode, before.decode)
        zones = {**prefill, **decode}
        self._targets = Targets(
            prefill=frozenset(prefill),
            decode=frozenset(decode),
            has_prefill_pool=before.has_prefill_pool,
            places={address: Place(zone) for address, zone in zones.items() if zone},
        )

    def _used(self, services: frozenset[str], before: frozenset[str]) -> dict[str, str]:
        """The zone of each address."""
        used: dict[str, str] = {}
        told: set[tuple[str, str]] = set()  # by slices that are there, of which service
        for known in self._all():
            if known.service not in services or known.port is None or not known.endpoints:
                continue
            if known.is_ipv6 and known.service in self._ipv4:  # the same pods once more
                continue
            for endpoint in known.endpoints:
                address = _address(endpoint.address, known.port)
                if known.name in self._slices:
                    told.add((known.service, address))
                elif (known.service, address) in told:
                    continue
                if endpoint.is_ready or (endpoint.is_terminating and address in before):
                    used[address] = endpoint.zone
        return used

    def _all(self) -> Iterator[Slice]:
        """Those that are there come first."""
        return chain(self._slices.values(), self._deleted.values())


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

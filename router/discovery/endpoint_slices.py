"""Which workers the EndpointSlices of some services name, after each list and each event. Pure."""

from collections.abc import Iterable, Sequence
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
    gone, so that it can end what it runs.
    """

    def __init__(self, *, prefill: Sequence[str], decode: Sequence[str]) -> None:
        """The services of the two pools, by name."""
        self._prefill, self._decode = frozenset(prefill), frozenset(decode)
        self._slices: dict[str, Slice] = {}
        self._ipv4: set[str] = set()  # services that had such addresses since the last list
        self._targets = Targets(has_prefill_pool=bool(prefill))

    @property
    def targets(self) -> Targets:
        """The set as known now."""
        return self._targets

    def listed(self, slices: Iterable[Slice]) -> None:
        """These are all that there are."""
        self._slices = {each.name: each for each in slices}
        self._ipv4.clear()
        self._name()

    def changed(self, known: Slice) -> None:
        """It is there, new or not."""
        self._slices[known.name] = known
        self._name()

    def deleted(self, name: str) -> None:
        """It is there no more. Idempotent.

        The last that has addresses of a family for its service counts until the next list: when
        a Service is made anew its slices are gone for a moment, and its pods run on.
        """
        known = self._slices.get(name)
        if known is not None and not (known.endpoints and self._is_last(known)):
            del self._slices[name]
            self._name()

    def _is_last(self, known: Slice) -> bool:
        others = (other for other in self._slices.values() if other.name != known.name)
        return not any(
            other.endpoints and (other.service, other.is_ipv6) == (known.service, known.is_ipv6)
            for other in others
        )

    def _name(self) -> None:
        before = self._targets
        filled = [known for known in self._slices.values() if known.endpoints]
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
        for known in self._slices.values():
            if known.service not in services or known.port is None or not known.endpoints:
                continue
            if known.is_ipv6 and known.service in self._ipv4:  # the same pods once more
                continue
            for endpoint in known.endpoints:
                address = _address(endpoint.address, known.port)
                if endpoint.is_ready or (endpoint.is_terminating and address in before):
                    used[address] = endpoint.zone
        return used


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

"""Workers from DNS: the names of headless services, asked for again and again.

A name that begins with ``_`` is asked for SRV records, which say ports, too; one with a port
for A records, or AAAA records where it has none.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from ipaddress import ip_address
from typing import Protocol

import dns.rdtypes.IN.SRV
from dns.asyncresolver import Resolver
from dns.exception import DNSException
from dns.rdatatype import AAAA, SRV, A, RdataType
from dns.resolver import NXDOMAIN, NoAnswer, NoResolverConfiguration

from diptych.address import is_address
from diptych.cancellation import pass_on_cancellation
from diptych.errors import ConfigurationError
from router.discovery.dns_names import NameSet
from router.discovery.source import Clock, Freshness, Targets
from router.discovery.worker_bound import WorkerBound
from router.discovery_settings import DnsSource

_ANSWER_S = 5.0  # for one name, retries included


class NoAnswerError(Exception):
    """Nobody could say what a name stands for."""


class Lookup(Protocol):
    """Asks for one name."""

    async def __call__(self, name: str) -> frozenset[str]:
        """Its addresses as host:port; none: there is no such name. Raises NoAnswerError."""
        ...


class DnsLookup:
    """Asks the system's servers, or one that is named."""

    def __init__(self, server: str | None) -> None:
        """``server`` as ip:port. Raises ConfigurationError: the system has none."""
        try:
            self._resolver = Resolver(configure=server is None)
        except NoResolverConfiguration:
            raise ConfigurationError("--dns.server: the system has no DNS server") from None
        if server is not None:
            host, _, port = server.rpartition(":")
            self._resolver.nameservers = [host.strip("[]")]
            self._resolver.port = int(port)

    async def __call__(self, name: str) -> frozenset[str]:
        """See :class:`Lookup`."""
        try:
            found = await self._ask(name)
        except (DNSException, OSError) as error:
            raise NoAnswerError(" ".join(str(error).split()) or type(error).__name__) from None
        finally:
            pass_on_cancellation()
        wrong = sorted(address for address in found if not is_address(address))
        if wrong:
            raise NoAnswerError(f"expected host:port, found {wrong[0][:100]!r}")
        return found

    async def _ask(self, name: str) -> frozenset[str]:
        if name.startswith("_"):
            return frozenset(
                f"{record.target.to_text(omit_final_dot=True)}:{record.port}"
                for record in await self._records(name, SRV)
                if isinstance(record, dns.rdtypes.IN.SRV.SRV)
            )
        host, _, port = name.rpartition(":")
        records = await self._records(host, A) or await self._records(host, AAAA)
        return frozenset(f"{_host(str(record))}:{port}" for record in records)

    async def _records(self, name: str, kind: RdataType) -> list[object]:
        try:
            return list(await self._resolver.resolve(name, kind, search=True, lifetime=_ANSWER_S))
        except (NXDOMAIN, NoAnswer):
            return []


class DnsDiscovery:
    """Asks for all names, one after the other, each interval."""

    def __init__(
        self,
        source: DnsSource,
        *,
        lookup: Lookup,
        clock: Clock,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._interval_s = source.interval_s
        self._lookup = lookup
        self._sleep = sleep
        self._set = NameSet(prefill=source.prefill, decode=source.decode)
        self._bound = WorkerBound(source.max_workers)
        self._freshness = Freshness(clock)

    @property
    def age_s(self) -> float:
        """Since all names had answers that were believed; see :class:`Discovery`."""
        return self._freshness.age_s

    async def targets(self) -> AsyncIterator[Targets]:
        """See :class:`router.discovery.source.Discovery`."""
        told = None
        while True:
            was_answered = False
            for name in self._set.names:
                was_answered |= await self._ask(name)
            if self._set.is_sure:
                self._freshness.heard()
            now = self._bound.of(self._set.targets)
            if now != told and (was_answered or told is not None):
                told = now
                yield now
            await self._sleep(self._interval_s)

    async def _ask(self, name: str) -> bool:
        try:
            self._set.answered(name, await self._lookup(name))
        except NoAnswerError as error:
            self._set.failed(name, str(error))
            return False
        return True


def _host(address: str) -> str:
    """As it stands before a port."""
    return f"[{address}]" if ip_address(address).version == 6 else address

"""How many workers a source may name. Pure."""

import logging
from collections.abc import AsyncGenerator

import pytest

from router.discovery.dns import DnsDiscovery
from router.discovery.endpoint_slices import Endpoint, Slice
from router.discovery.kubernetes import Change, KubernetesDiscovery, Listed
from router.discovery.source import Discovery, Targets
from router.discovery.worker_bound import WorkerBound
from router.discovery_settings import DnsSource, KubernetesSource
from router.placement.place import Place
from tests.unit.router.discovery.scripted import ScriptIsOverError, told_by


def decode(*hosts: str, prefill: str = "") -> Targets:
    return Targets(prefill=frozenset(prefill.split()), decode=frozenset(hosts))


def test_of_too_many_those_that_were_taken_stay_and_it_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bound = WorkerBound(2)
    assert bound.of(decode("c", "d", prefill="p q")) == decode("c", "d", prefill="p q")
    assert not caplog.records
    for _ in range(3):
        taken = bound.of(decode("a", "b", "c", "d", prefill="p"))
        assert taken == decode("c", "d", prefill="p")
    assert bound.of(decode("a", "b", "d")) == decode("a", "d"), "one of them is gone"
    (record,) = caplog.records
    assert (record.levelno, vars(record)["pool"]) == (logging.WARNING, "decode")
    assert vars(record)["why"] == "only 2 are taken (max_workers)"
    assert bound.of(decode("a")) == decode("a")
    bound.of(decode("a", "b", "c"))
    assert len(caplog.records) == 2, "it is told again after it was over"


def test_what_else_is_known_stays() -> None:
    places = {"a": Place("zone-1")}
    named = Targets(decode=frozenset("ab"), has_prefill_pool=False, places=places)
    taken = WorkerBound(1).of(named)
    assert (taken.has_prefill_pool, taken.places) == (False, places)


class Api:
    """Lists five pods once."""

    def __init__(self) -> None:
        endpoints = tuple(Endpoint(f"h{number}", True, False) for number in range(5))
        self._lists = [Listed("1", (Slice("d-1", "d", 1, endpoints),))]

    async def list(self) -> Listed:
        if not self._lists:
            raise ScriptIsOverError
        return self._lists.pop()

    async def watch(self, version: str) -> AsyncGenerator[Change, None]:
        return
        yield

    async def close(self) -> None:
        pass


async def test_dns_and_slices_are_bounded() -> None:
    async def lookup(name: str) -> frozenset[str]:
        return frozenset(f"10.0.0.{number}:1" for number in range(5))

    async def sleep(seconds: float) -> None:
        raise ScriptIsOverError

    def clock() -> float:
        return 0.0

    names = DnsSource(decode=["d:1"], max_workers=2)
    services = KubernetesSource(decode=["d"], max_workers=3)
    sources: list[Discovery] = [
        DnsDiscovery(names, lookup=lookup, clock=clock, sleep=sleep),
        KubernetesDiscovery(services, api=Api(), clock=clock, sleep=sleep),
    ]
    taken = [len(told.decode) for source in sources for told in await told_by(source)]
    assert taken == [2, 3]

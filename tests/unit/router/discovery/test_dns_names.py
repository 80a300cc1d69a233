"""What DNS names stand for after answers, empty answers and none. No sockets, no sleeps."""

from collections.abc import Callable, Iterable, Mapping

import pytest

from router.discovery.dns import DnsDiscovery, NoAnswerError
from router.discovery.dns_names import NameSet
from router.discovery.source import Targets
from router.discovery_settings import DnsSource
from tests.unit.router.discovery.scripted import ScriptIsOverError, told_by


def addresses(*given: str) -> frozenset[str]:
    return frozenset(given)


def targets(*decode: str, prefill: Iterable[str] = ()) -> Targets:
    return Targets(prefill=frozenset(prefill), decode=frozenset(decode), has_prefill_pool=True)


def two_names() -> NameSet:
    names = NameSet(prefill=["p:1"], decode=["d:1"])
    names.answered("p:1", addresses("10.0.0.1:1"))
    names.answered("d:1", addresses("10.0.0.2:1", "10.0.0.3:1"))
    return names


def test_the_set_is_what_all_names_stand_for() -> None:
    names = NameSet(prefill=["p:1", "q:1"], decode=["d:1"])
    names.answered("p:1", addresses("10.0.0.1:1", "10.0.0.9:1"))
    names.answered("q:1", addresses("10.0.0.9:1"))
    assert not names.is_sure
    names.answered("d:1", addresses("10.0.0.2:1"))
    assert names.is_sure
    assert names.targets == targets("10.0.0.2:1", prefill=["10.0.0.1:1", "10.0.0.9:1"])
    names.answered("p:1", addresses("10.0.0.1:1", "10.0.0.7:1"))
    assert names.targets.prefill == {"10.0.0.1:1", "10.0.0.7:1", "10.0.0.9:1"}


def test_without_a_name_for_it_there_is_no_prefill_pool() -> None:
    assert not NameSet(prefill=[], decode=["d:1"]).targets.has_prefill_pool


def test_one_name_may_stand_for_both_pools() -> None:
    names = NameSet(prefill=["w:1"], decode=["w:1"])
    assert names.names == ("w:1",)
    names.answered("w:1", addresses("10.0.0.1:1"))
    assert names.targets == targets("10.0.0.1:1", prefill=["10.0.0.1:1"])


def test_a_failure_changes_nothing_however_often(caplog: pytest.LogCaptureFixture) -> None:
    names = two_names()
    before = names.targets
    for _ in range(100):
        names.failed("d:1", "timed out")
        assert not names.is_sure
    assert names.targets == before
    assert len(caplog.records) == 1
    names.answered("d:1", addresses("10.0.0.2:1", "10.0.0.3:1"))
    assert names.is_sure


def test_an_address_is_gone_when_three_answers_in_a_row_are_without_it() -> None:
    names, both = two_names(), addresses("10.0.0.2:1", "10.0.0.3:1")
    one = addresses("10.0.0.2:1")
    for answer in (one, one, both, one, one):
        names.answered("d:1", answer)
        assert names.targets.decode == both
        assert names.is_sure == (answer == both)
    names.failed("d:1", "timed out")
    for answer in (one, one):
        names.answered("d:1", answer)
        assert names.targets.decode == both, "not in a row"
    names.answered("d:1", addresses("10.0.0.2:1", "10.0.0.4:1"))
    assert names.targets.decode == {"10.0.0.2:1", "10.0.0.4:1"}, "a new one counts at once"
    assert names.is_sure


def test_an_empty_answer_counts_when_it_comes_three_times_in_a_row(
    caplog: pytest.LogCaptureFixture,
) -> None:
    NameSet(prefill=[], decode=["d:1"]).answered("d:1", addresses())
    assert not caplog.records, "where nothing is known, nothing is in doubt"
    two_names().answered("d:1", addresses("10.0.0.2:1"))
    assert not caplog.records, "of an answer that has others nothing is told"
    names = two_names()
    interruptions: list[Callable[[], object]] = [
        lambda: names.failed("d:1", "refused"),
        lambda: None,
    ]
    for interruption in interruptions:
        for _ in range(2):
            names.answered("d:1", addresses())
            assert "the answer is empty" in str(vars(caplog.records[0]))
            assert len(names.targets.decode) == 2
            assert not names.is_sure
        interruption()
    names.answered("d:1", addresses())
    assert names.targets == targets(prefill=["10.0.0.1:1"])
    assert names.is_sure
    names.answered("d:1", addresses("10.0.0.2:1"))
    names.answered("d:1", addresses())
    assert names.targets.decode == {"10.0.0.2:1"}, "doubted anew"


class Script:
    """Answers, round by round: addresses, or None for a failure."""

    def __init__(self, *rounds: Mapping[str, frozenset[str] | None]) -> None:
        self.rounds = list(rounds)
        self.now_s = 0.0
        source = DnsSource(prefill=["p:1"], decode=["d:1"], interval_s=10.0)
        self.discovery = DnsDiscovery(
            source, lookup=self._lookup, clock=lambda: self.now_s, sleep=self._sleep
        )

    async def _lookup(self, name: str) -> frozenset[str]:
        found = self.rounds[0][name]
        if found is None:
            raise NoAnswerError("timed out")
        return found

    async def _sleep(self, seconds: float) -> None:
        self.now_s += seconds
        del self.rounds[0]
        if not self.rounds:
            raise ScriptIsOverError

    async def told(self) -> list[Targets]:
        return await told_by(self.discovery)


async def test_only_changes_are_told() -> None:
    p = addresses("10.0.0.1:1")
    one, two = addresses("10.0.0.2:1"), addresses("10.0.0.2:1", "10.0.0.3:1")
    moved = addresses("10.0.0.4:1", "10.0.0.3:1")
    script = Script(
        {"p:1": None, "d:1": None},  # nothing is known yet: nothing is told
        {"p:1": None, "d:1": one},
        {"p:1": p, "d:1": one},
        {"p:1": p, "d:1": one},
        {"p:1": p, "d:1": two},
        {"p:1": p, "d:1": moved},
        {"p:1": p, "d:1": moved},
        {"p:1": p, "d:1": moved},
        {"p:1": p, "d:1": None},
    )
    assert await script.told() == [
        targets(*one),
        targets(*one, prefill=p),
        targets(*two, prefill=p),
        targets(*two, *moved, prefill=p),
        targets(*moved, prefill=p),
    ]


async def test_ten_minutes_without_dns_change_nothing_but_its_age() -> None:
    known = {"p:1": addresses("10.0.0.1:1"), "d:1": addresses("10.0.0.2:1")}
    silent: Mapping[str, frozenset[str] | None] = {"p:1": None, "d:1": None}
    script = Script(known, known, *(60 * [silent]))
    assert len(await script.told()) == 1
    assert script.discovery.age_s == 610.0

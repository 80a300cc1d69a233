"""A pull over a pair that is being proven, or whose agent ends, over stand-ins for the fetches."""

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from diptych.v1 import common_pb2, decode_pb2
from kvtransfer.reader.fetch_driver import FetchDriver
from kvtransfer.reader.lease_pull import MAX_FETCHES, LeasePull
from kvtransfer.reader.pair import PeerKey, SourcePair
from kvtransfer.reader.proof import ProbeKit
from kvtransfer.reader.proven_link import Link, ProvenLink
from kvtransfer.reader.pull_machine import PullError, PullResult
from kvtransfer.transports.base import Peer

LINK = Link(cast(Any, None), "nixl", cast(Peer, None), lambda: None)
PROVEN = PullResult(stats=common_pb2.TransferStats())
AGENT_LOST = PullError(decode_pb2.PULL_FAILURE_SOURCE_LOST, "agent", agent_lost=True)
UNPROVEN = PullError(decode_pb2.PULL_FAILURE_UNPROVEN, "digest")
STANDS = PullError(decode_pb2.PULL_FAILURE_TRANSPORT, "no progress")
UNASKED = PullError(decode_pb2.PULL_FAILURE_TRANSPORT, "an earlier read", unasked=True)


class Pair(SourcePair):
    """Proven and lost by the test alone."""

    def __init__(self) -> None:
        super().__init__(
            PeerKey("address", "incarnation"),
            cast(ProbeKit, SimpleNamespace(random=None)),
            lambda: None,
            lambda: None,
            lambda _: None,
        )
        self.num_lost = 0

    def prove(self, link: Link = LINK) -> None:
        self._machine.prove(ProvenLink(link, 1e9), "")
        self._tell()

    def lost(self, why: str) -> None:
        self.num_lost += 1
        super().lost(why)


class Fetch:
    def __init__(self, outcome: PullResult | PullError, meanwhile: Callable[[], object]) -> None:
        self._outcome = outcome
        self._meanwhile = meanwhile

    def abandon(self) -> frozenset[int]:
        return frozenset()

    async def run(self) -> PullResult:
        self._meanwhile()
        if isinstance(self._outcome, PullError):
            raise self._outcome
        return self._outcome


class Case:
    """One pull whose fetches end as told; what it counted."""

    def __init__(
        self,
        pair: Pair | None,
        outcomes: Iterator[PullResult | PullError],
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        """``meanwhile`` happens while one is under way."""
        self.num_refetches = 0

        def count() -> None:
            self.num_refetches += 1

        open_fetch = cast(
            "Callable[[Link], FetchDriver]", lambda _: Fetch(next(outcomes), meanwhile)
        )
        self.pull = LeasePull(
            pair,
            open_fetch,
            source_address="10.0.0.7:50",
            wait_s=0.05,
            on_refetch=count,
        )


async def failure_of(case: Case) -> PullError:
    with pytest.raises(PullError) as caught:
        await case.pull.run()
    return caught.value


async def test_it_waits_for_a_pair_that_is_being_proven() -> None:
    pair = Pair()
    case = Case(pair, iter([PROVEN]))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(case.pull.run())
        await asyncio.sleep(0)
        assert not running.done()
        pair.prove()
    assert running.result() is PROVEN


async def test_it_waits_no_longer_than_it_may_nor_for_a_pair_that_is_left_or_unknown() -> None:
    new, lost, left = Pair(), Pair(), Pair()
    lost.prove()
    lost.lost("the connection broke")
    left.leave()
    for pair, why in (
        (new, "not proven within 0.05 s"),
        (lost, "the connection broke"),
        (left, "nobody names the source"),
        (None, "no router names it"),
    ):
        error = await failure_of(Case(pair, iter([])))
        assert error.failure == decode_pb2.PULL_FAILURE_NOT_CONNECTED
        assert error.message == f"no proven connection to 10.0.0.7:50: {why}"


async def test_a_lost_agent_costs_a_fetch_and_the_pair_is_proven_anew() -> None:
    pair = Pair()
    pair.prove()
    case = Case(pair, iter([AGENT_LOST, PROVEN]))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(case.pull.run())
        while not pair.num_lost:
            await asyncio.sleep(0)
        pair.prove()
    assert running.result() is PROVEN
    assert case.num_refetches == 1


async def test_a_pair_that_is_not_proven_again_fails_it_as_the_lost_agent_did() -> None:
    pair = Pair()
    pair.prove()
    error = await failure_of(Case(pair, iter([AGENT_LOST])))
    assert (error.failure, error.agent_lost) == (AGENT_LOST.failure, True)
    assert error.message == "agent; its pair was not proven again within 0.05 s"


async def test_a_pair_that_fails_after_the_agent_was_lost_says_how() -> None:
    """It was not waited for: a time that it took would send whoever reads it to the wrong place."""
    pair = Pair()
    pair.prove()

    def fail() -> None:
        pair.lost("agent")
        pair._machine.fail("nixl: the source has none")

    error = await failure_of(Case(pair, iter([AGENT_LOST]), fail))
    assert error.message == "agent; its pair was not proven again: nixl: the source has none"


async def test_other_failures_are_the_routers_to_decide() -> None:
    pair = Pair()
    pair.prove()
    case = Case(pair, iter([UNPROVEN]))
    assert await failure_of(case) is UNPROVEN
    assert not case.num_refetches
    assert not pair.num_lost


@pytest.mark.parametrize(("error", "num_lost"), [(STANDS, 1), (UNASKED, 0)])
async def test_a_pull_that_stands_still_loses_its_pair_only_if_the_source_was_asked(
    error: PullError, num_lost: int
) -> None:
    pair = Pair()
    pair.prove()
    assert await failure_of(Case(pair, iter([error]))) is error
    assert pair.num_lost == num_lost


async def test_agents_that_end_each_time_fail_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    pair.prove()
    monkeypatch.setattr(pair, "lost", lambda _: None)
    case = Case(pair, iter([AGENT_LOST] * 2 * MAX_FETCHES))
    assert await failure_of(case) is AGENT_LOST
    assert case.num_refetches == MAX_FETCHES - 1


async def test_a_late_failure_does_not_cost_the_link_that_was_proven_meanwhile() -> None:
    pair = Pair()
    pair.prove()
    newer = Link(cast(Any, None), "nixl", cast(Peer, None), lambda: None)

    def prove_anew() -> None:
        pair.lost("the connection broke")
        pair.prove(newer)

    cut = PullError(decode_pb2.PULL_FAILURE_TRANSPORT, "cut")
    assert await failure_of(Case(pair, iter([cut]), prove_anew)) is cut
    assert pair.link is newer
    assert pair.num_lost == 1


async def test_an_abandoned_pull_is_not_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    pair.prove()
    monkeypatch.setattr(pair, "lost", lambda _: None)  # its agent is back at once
    case = Case(pair, iter([AGENT_LOST, PROVEN]), lambda: case.pull.abandon())
    with pytest.raises(PullError):
        await case.pull.run()
    assert not case.num_refetches

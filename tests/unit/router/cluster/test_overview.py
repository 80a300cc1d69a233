"""What people are told of workers: what they said last, each pair that is ours, within bounds."""

from collections.abc import Container, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from diptych.v1 import worker_pb2
from router.cluster.decode_link import DecodeLink
from router.cluster.member import DecodeMember, PrefillMember
from router.cluster.overview import MAX_PAIRS, MAX_WORKERS, overview
from router.cluster.watch import WorkerWatch
from router.generation.cluster_report import BlockReport, PairReport, WorkerReport
from router.placement.runway import Runway
from tests.unit.router.cluster.world import World, proven, targets

READY = worker_pb2.SERVING_STATE_READY


def watch(address: str, state: worker_pb2.WorkerState | None) -> WorkerWatch:
    return cast(WorkerWatch, SimpleNamespace(address=address, state=state, worker=None))


def prefill(address: str, state: worker_pb2.WorkerState | None) -> PrefillMember:
    return PrefillMember(watch(address, state), Runway(1, 1.0))


def decode(
    address: str, state: worker_pb2.WorkerState | None, sources: Container[str] = ()
) -> DecodeMember:
    link = SimpleNamespace(watch=watch(address, state), worker=None)
    member = DecodeMember(cast(DecodeLink, link))
    member.find_own_pairs(sources)
    return member


class CountedPairs(list[worker_pb2.Pair]):
    """Counts how often one of them was looked at."""

    num_looks = 0

    def __iter__(self) -> Iterator[worker_pb2.Pair]:
        for each in super().__iter__():
            self.num_looks += 1
            yield each

    def __getitem__(self, place: Any) -> Any:
        self.num_looks += 1
        return super().__getitem__(place)


class CountedState:
    """A worker's state but for its pairs."""

    def __init__(self, state: worker_pb2.WorkerState, pairs: CountedPairs) -> None:
        self._state, self.pairs = state, pairs

    def __getattr__(self, name: str) -> object:
        return getattr(self._state, name)


def pair(source: str, num_pulls: int = 0) -> worker_pb2.Pair:
    made = worker_pb2.Pair(
        source_address=source,
        state=worker_pb2.PAIR_STATE_PROVEN,
        transport="nixl",
        bytes_per_s=2e9,
        way="DRAM to DRAM",
    )
    made.transfer.num_pulls = num_pulls
    return made


def test_a_worker_is_as_it_said_last() -> None:
    blocks = worker_pb2.BlockCounts(
        total=21, free=1, cached=2, running=3, reserved=4, leased=5, quarantined=6
    )
    state = worker_pb2.WorkerState(
        state=READY, blocks=blocks, num_running=7, num_waiting=8, max_num_seqs=9,
        num_pending_prefill_tokens=10, prefill_tokens_per_s=11.0, decode_step_s=0.5,
        message="x" * 1000,
    )  # fmt: skip
    (told,) = overview([prefill("p:1", state)], []).prefill
    assert told == WorkerReport(
        address="p:1", state="ready", message="x" * 200, is_used=False,
        blocks=BlockReport(
            total=21, free=1, cached=2, running=3, reserved=4, leased=5, quarantined=6
        ),
        num_running=7, num_waiting=8, max_num_seqs=9, num_pending_prefill_tokens=10,
        prefill_tokens_per_s=11.0, decode_step_s=0.5,
    )  # fmt: skip
    owners = [told.blocks.free, told.blocks.cached, told.blocks.running, told.blocks.reserved]
    assert sum(owners) + told.blocks.leased + told.blocks.quarantined == told.blocks.total


def test_one_that_says_nothing_and_one_of_a_later_version() -> None:
    later = worker_pb2.WorkerState(state=99)  # type: ignore[arg-type]
    told = overview([], [decode("b:1", later), decode("a:1", None)]).decode
    assert [(each.address, each.state) for each in told] == [
        ("a:1", "unreachable"),
        ("b:1", "unknown"),
    ]


def test_pairs_with_workers_of_other_routers_are_not_told() -> None:
    state = worker_pb2.WorkerState(state=READY, pairs=[pair("p:1", 3), pair("elsewhere:1")])
    told = overview([prefill("p:1", None)], [decode("d:1", state, {"p:1"})])
    assert told.pairs == (
        PairReport(
            prefill="p:1", decode="d:1", state="proven", transport="nixl", bytes_per_s=2e9,
            num_pulls=3, way="DRAM to DRAM",
        ),
    )  # fmt: skip
    assert told.num_pairs == 1


def test_there_is_a_bound_and_the_counts_are_of_all() -> None:
    assert MAX_PAIRS < 4 * (MAX_WORKERS + 1)
    addresses = [f"p{index}:1" for index in range(MAX_WORKERS + 1)]
    state = worker_pb2.WorkerState(state=READY, pairs=[pair(address) for address in addresses])
    told = overview(
        [prefill(address, None) for address in addresses],
        [decode(f"d{index}:1", state, addresses) for index in range(4)],
    )
    assert (len(told.prefill), told.num_prefill) == (MAX_WORKERS, MAX_WORKERS + 1)
    assert (len(told.pairs), told.num_pairs) == (MAX_PAIRS, 4 * (MAX_WORKERS + 1))


@pytest.mark.parametrize("num_known", [0, 1, 512])
def test_512_by_512_cost_a_look_at_no_more_pairs_than_are_told(num_known: int) -> None:
    """Whether all of them are this router's, or few: then it looks at no others to find those."""
    addresses = [f"p{index}:1" for index in range(512)]
    known = frozenset(addresses[-num_known:] if num_known else ())
    pairs = CountedPairs(pair(address) for address in addresses)
    state = cast(worker_pb2.WorkerState, CountedState(worker_pb2.WorkerState(state=READY), pairs))
    sinks = [decode(f"d{index}:1", state, known) for index in range(512)]
    sources = [prefill(address, None) for address in known]
    pairs.num_looks = 0
    told = overview(sources, sinks)
    assert (told.num_prefill, told.num_decode) == (num_known, 512)
    assert told.num_pairs == num_known * 512
    assert len(told.pairs) == min(MAX_PAIRS, told.num_pairs)
    assert pairs.num_looks == len(told.pairs)


def test_pairs_that_a_worker_dropped_without_a_word_are_not_told_of() -> None:
    """Its version of them says that they are the same."""
    world = World(prefill=2, decode=1)
    del world.prefill[1:]  # of which it says that it has pairs with them
    world.says("d0:1")
    assert [each.prefill for each in world.cluster.overview().pairs] == ["p0:1"]


def test_pairs_follow_what_workers_say_and_who_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(prefill=2, decode=2)

    def told() -> tuple[int, list[tuple[str, str]]]:
        seen = world.cluster.overview()
        return seen.num_pairs, [(each.prefill, each.decode) for each in seen.pairs]

    assert told() == (4, [(p, d) for d in world.decode for p in world.prefill])
    failed = worker_pb2.Pair(source_address="p0:1", state=worker_pb2.PAIR_STATE_FAILED)
    world.says("d1:1", pairs_version=2, pairs=[failed, proven("elsewhere:1")])
    assert told() == (5, [*told()[1][:2], ("p0:1", "d1:1"), ("p1:1", "d1:1"), ("p0:1", "d1:1")])
    world.cluster.set_members(targets(["p0:1"], world.decode))
    assert told() == (3, [("p0:1", "d0:1"), ("p0:1", "d1:1"), ("p0:1", "d1:1")])
    world.cluster.set_members(targets(["p0:1", "elsewhere:1"], world.decode))
    assert ("elsewhere:1", "d1:1") in told()[1]
    world.watch("d1:1")._lose("gone")
    assert told() == (1, [("p0:1", "d0:1")])
    looks = []
    monkeypatch.setattr(DecodeMember, "find_own_pairs", lambda *_: looks.append(1))
    world.says("d0:1", num_running=2)
    world.cluster.set_members(targets(["p0:1", "elsewhere:1"], world.decode))
    assert not looks, "for load alone, or the same members, no pair is looked at"

"""A transport over which a source took our agent with it rests longer each time."""

from itertools import pairwise
from random import Random

from diptych.v1 import kv_source_pb2
from kvtransfer.reader.transport_rests import TransportRests

REPROVE_S = 30.0
AGENT, OTHER, THIRD = (
    kv_source_pb2.MemoryDescriptor(agent_metadata=each) for each in (b"1", b"2", b"3")
)


def took(rests: TransportRests, now: float, name: str = "nixl") -> None:
    rests.took_agent(name, f"{name} took it", AGENT, now, REPROVE_S)


def test_it_rests_twice_as_long_each_time_up_to_a_limit_until_it_worked() -> None:
    rests = TransportRests(Random(0))
    now = 100.0
    for length_s in (15.0, 30.0, 60.0, 120.0, 240.0, 480.0, 480.0):
        took(rests, now)
        assert rests.resting("nixl", AGENT, now + length_s / 2 - 0.1) == "nixl took it"
        now += length_s
        assert not rests.resting("nixl", AGENT, now)
    rests.worked("nixl")
    rests.worked("inline")
    took(rests, now)
    assert not rests.resting("nixl", AGENT, now + 15.0)


def test_each_transport_rests_by_itself() -> None:
    rests = TransportRests(Random(0))
    took(rests, 0.0)
    took(rests, 10.0, "ucxx")
    for now, ours in ((7.0, {"nixl", "ucxx"}), (17.0, {"ucxx"}), (25.0, set())):
        assert {each for each in ("nixl", "ucxx") if rests.resting(each, AGENT, now)} == ours


def test_where_nothing_else_works_it_rests_no_longer_than_better_ones_wait() -> None:
    rests = TransportRests(Random(0))
    for _ in range(5):
        took(rests, 0.0)
    assert rests.resting("nixl", AGENT, 100.0)
    rests.nothing_else_works(REPROVE_S)
    assert rests.resting("nixl", AGENT, 14.9)
    assert not rests.resting("nixl", AGENT, 30.0)
    took(rests, 30.0)
    assert rests.resting("nixl", AGENT, 30.0 + 29.9), "something else may work by now"
    assert not rests.resting("nixl", AGENT, 30.0 + 60.0)


def test_pairs_that_met_one_fault_do_not_come_back_together() -> None:
    random = Random(0)
    pairs = [TransportRests(random) for _ in range(100)]
    for each in pairs:
        took(each, 0.0)
    num_resting = [
        sum(each.resting("nixl", AGENT, s) is not None for each in pairs) for s in range(16)
    ]
    assert (num_resting[7], num_resting[15]) == (100, 0)
    assert max(a - b for a, b in pairwise(num_resting)) < 25


def test_another_agent_of_the_source_is_tried_at_once_but_not_again_and_again() -> None:
    rests = TransportRests(Random(0))
    took(rests, 0.0)
    assert rests.resting("nixl", AGENT, 1.0)
    assert not rests.resting("nixl", OTHER, 1.0)
    rests.took_agent("nixl", "again", OTHER, 1.0, REPROVE_S)
    assert rests.resting("nixl", THIRD, 1.0 + 7.4)
    assert not rests.resting("nixl", THIRD, 1.0 + 15.0)


def test_a_read_that_breaks_our_agent_is_to_blame_the_second_time() -> None:
    """Once is what a stopped source leaves; with another agent of the source's it begins anew."""
    rests = TransportRests(Random(0))

    def broke(agent: kv_source_pb2.MemoryDescriptor, now: float) -> bool:
        return rests.took_agent("nixl", "lost", agent, now, REPROVE_S, by_read=True)

    assert not broke(AGENT, 0.0)
    assert not rests.resting("nixl", AGENT, 0.0)
    assert broke(AGENT, 1.0)
    assert rests.resting("nixl", AGENT, 2.0) == "lost"
    assert not rests.resting("nixl", OTHER, 2.0)
    assert not broke(OTHER, 3.0)
    rests.worked("nixl")
    assert not broke(OTHER, 4.0)
    assert not rests.resting("nixl", OTHER, 4.0)

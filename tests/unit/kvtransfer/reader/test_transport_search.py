"""Whose turn it is after a failure, and when the search for a transport is over."""

import pytest

from diptych.v1 import decode_pb2
from kvtransfer.reader.pull_machine import PullError
from kvtransfer.reader.transport_search import TransportSearch, Turn

RANKED = ["nixl", "ucxx", "inline"]
NOT_NOW = PullError(decode_pb2.PULL_FAILURE_TRANSPORT, "not now")
AGENT_LOST = PullError(decode_pb2.PULL_FAILURE_SOURCE_LOST, "its agent ended", agent_lost=True)

TOOK_AGENT = PullError(decode_pb2.PULL_FAILURE_TRANSPORT, "no answer", took_agent=True)


def test_each_transport_has_three_tries_and_then_the_next_one() -> None:
    search = TransportSearch(RANKED)
    for name in RANKED:
        assert search.wanted[0] == name
        turns = [search.failed(name, NOT_NOW) for _ in range(3)]
        assert turns == [Turn.SAME, Turn.SAME, Turn.NEXT]
    assert not search.wanted
    assert search.error.message == "nixl: not now; ucxx: not now; inline: not now"


def test_an_agent_that_ends_has_more_tries_that_blame_nobody() -> None:
    search = TransportSearch(RANKED)
    for _ in range(20):
        assert search.failed("nixl", AGENT_LOST) is Turn.SAME
    assert not search.has_failures
    turns = [search.failed("nixl", AGENT_LOST) for _ in range(3)]
    assert turns == [Turn.SAME, Turn.SAME, Turn.NEXT]


def test_who_took_our_agent_has_no_second_try() -> None:
    """It would take it again, and from all others."""
    search = TransportSearch(RANKED)
    assert search.failed("nixl", TOOK_AGENT) is Turn.NEXT
    assert search.wanted == ["ucxx", "inline"]
    assert search.message == "nixl: no answer"


def test_who_took_our_agent_though_only_it_was_lost_has_none_either() -> None:
    search = TransportSearch(RANKED)
    took = PullError(decode_pb2.PULL_FAILURE_SOURCE_LOST, "lost", agent_lost=True, took_agent=True)
    assert search.failed("nixl", took) is Turn.NEXT
    assert search.message == "nixl: lost"


def test_what_is_passed_over_is_not_tried_and_says_why() -> None:
    search = TransportSearch(RANKED)
    search.pass_over("nixl", "no answer")
    assert search.wanted == ["ucxx", "inline"]
    assert search.has_failures
    search.worked("ucxx")
    assert search.message == "nixl: no answer"
    search = TransportSearch(["nixl"])
    search.pass_over("nixl", "no answer")
    assert search.error.message == "nixl: no answer"


@pytest.mark.parametrize(
    "error",
    [
        PullError(decode_pb2.PULL_FAILURE_SOURCE_LOST, "gone"),
        PullError(decode_pb2.PULL_FAILURE_TRANSPORT, "no", refusal="WORKER_DRAINING"),
    ],
)
def test_what_is_no_transports_fault_ends_the_search(error: PullError) -> None:
    search = TransportSearch(RANKED)
    with pytest.raises(PullError) as caught:
        search.failed("nixl", error)
    assert caught.value is error
    assert not search.has_failures


def test_a_transport_that_the_source_lacks_is_passed_over_with_the_one_that_failed() -> None:
    search = TransportSearch(RANKED)
    search.failed("ucxx", NOT_NOW)
    search.pass_over("ucxx", "not now")
    assert search.wanted == ["inline"]


def test_what_works_in_the_end_has_not_failed() -> None:
    search = TransportSearch(RANKED)
    for _ in range(3):
        search.failed("nixl", NOT_NOW)
    search.failed("ucxx", NOT_NOW)
    search.worked("ucxx")
    assert search.message == "nixl: not now"

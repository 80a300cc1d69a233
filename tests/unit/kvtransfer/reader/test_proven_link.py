"""For how long a link's peer is kept."""

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from diptych.v1.kv_source_pb2 import MemoryDescriptor
from kvtransfer.reader.proven_link import Link, RefusedLinks
from kvtransfer.transports.base import Peer


class Case:
    def __init__(self) -> None:
        self.closed: list[str] = []
        close = partial(self.closed.append, "closed")
        self.peer = SimpleNamespace(usable=True)
        self.link = Link(cast(Any, None), "nixl", cast(Peer, self.peer), close)


def test_a_retired_link_is_closed_with_its_last_fetch() -> None:
    case = Case()
    with case.link.fetching():
        with case.link.fetching():
            case.link.retire()
        assert not case.closed
    assert case.closed == ["closed"]


def test_without_fetches_it_is_closed_at_once() -> None:
    case = Case()
    with case.link.fetching():
        pass
    assert not case.closed
    case.link.retire()
    assert case.closed == ["closed"]


def test_a_lost_one_is_closed_under_its_fetches_once() -> None:
    case = Case()
    with case.link.fetching():
        case.link.close()
        assert case.closed == ["closed"]
        case.link.retire()
    case.link.close()
    assert case.closed == ["closed"]


def test_a_link_that_was_refused_serves_the_next_try_of_the_same_agents() -> None:
    links, case, memory = RefusedLinks(), Case(), MemoryDescriptor(agent_metadata=b"first")
    assert links.take("nixl", memory) is None
    links.keep(case.link, memory)
    assert links.take("staged", memory) is None
    assert links.take("nixl", memory) is case.link
    assert links.take("nixl", memory) is None, "it is the caller's"
    assert not case.closed


def test_a_refused_link_is_closed_with_its_agents_and_at_the_end() -> None:
    links, memory = RefusedLinks(), MemoryDescriptor(agent_metadata=b"first")
    ended, replaced, overtaken, left = cases = [Case() for _ in range(4)]
    links.keep(ended.link, memory)
    ended.peer.usable = False
    assert links.take("nixl", memory) is None
    links.keep(replaced.link, memory)
    assert links.take("nixl", MemoryDescriptor(agent_metadata=b"next")) is None
    links.keep(overtaken.link, memory)
    links.keep(left.link, memory)
    assert not left.closed
    links.close()
    assert [case.closed for case in cases] == [["closed"]] * 4

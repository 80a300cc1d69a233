"""For how long a link's peer is kept."""

from functools import partial
from typing import Any, cast

from kvtransfer.reader.proven_link import Link
from kvtransfer.transports.base import Peer


class Case:
    def __init__(self) -> None:
        self.closed: list[str] = []
        close = partial(self.closed.append, "closed")
        self.link = Link(cast(Any, None), "nixl", cast(Peer, None), close)


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

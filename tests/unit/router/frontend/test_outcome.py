"""What the record of a request says of its end."""

import asyncio
import time

import pytest

from diptych.errors import DiptychError, NoWorkerError
from router.frontend.outcome import telling_outcome


def no() -> bool:
    return False


@pytest.mark.parametrize(
    ("left_s", "says"),
    [
        (None, "cancelled"),
        (60.0, "cancelled"),
        (0.05, "DEADLINE_EXCEEDED"),
        (-1.0, "DEADLINE_EXCEEDED"),
    ],
)
def test_who_leaves_about_its_deadline_left_because_of_it(left_s: float | None, says: str) -> None:
    """A client's deadline passes before the router's, which began to count when it was asked."""
    told: list[str] = []
    deadline_s = None if left_s is None else time.monotonic() + left_s
    with pytest.raises(asyncio.CancelledError), telling_outcome(told.append, deadline_s, no):
        raise asyncio.CancelledError
    assert told == [says]


@pytest.mark.parametrize("how", [asyncio.CancelledError, GeneratorExit])
def test_whom_the_router_cuts_off_did_not_leave(how: type[BaseException]) -> None:
    """It is told what its client is."""
    told: list[str] = []
    with pytest.raises(how), telling_outcome(told.append, None, lambda: True):
        raise how
    with telling_outcome(told.append, None, lambda: True):
        pass
    assert told == ["WORKER_DRAINING", "ok"]


def test_other_ends_are_told_as_they_are() -> None:
    told: list[str] = []
    with telling_outcome(told.append, None, no):
        pass
    with pytest.raises(DiptychError), telling_outcome(told.append, None, no):
        raise NoWorkerError("nobody")
    with pytest.raises(ValueError, match="a bug"), telling_outcome(told.append, None, no):
        raise ValueError("a bug")
    assert told == ["ok", "NO_WORKER", "INTERNAL"]

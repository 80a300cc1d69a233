"""What the record of a request says of its end."""

import asyncio
import time

import pytest

from diptych.errors import DiptychError, NoWorkerError
from router.frontend.outcome import telling_outcome


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
    with pytest.raises(asyncio.CancelledError), telling_outcome(told.append, deadline_s):
        raise asyncio.CancelledError
    assert told == [says]


def test_other_ends_are_told_as_they_are() -> None:
    told: list[str] = []
    with telling_outcome(told.append, None):
        pass
    with pytest.raises(DiptychError), telling_outcome(told.append, None):
        raise NoWorkerError("nobody")
    with pytest.raises(ValueError, match="a bug"), telling_outcome(told.append, None):
        raise ValueError("a bug")
    assert told == ["ok", "NO_WORKER", "INTERNAL"]

"""Who waits before all that have fair turns. Pure."""

import random

from diptych.request_class import RequestClass
from router.placement.front_line import FrontLine

REALTIME, STANDARD, BATCH = RequestClass


def line() -> FrontLine[str]:
    """Three that were placed once, and return in another order."""
    front = FrontLine[str]()
    front.add("third", 10, STANDARD)
    front.add("second", 9, REALTIME)
    front.add("first", 3, BATCH)
    return front


def test_they_are_asked_as_they_came() -> None:
    front = line()
    assert front.in_order() == ["first", "second", "third"]
    assert front.first == "first"
    assert len(front) == 3


def test_whoever_was_asked_is_the_last() -> None:
    front = line()
    assert list(front) == ["third", "second", "first"]
    front.asked("third")
    front.asked("nobody")
    assert list(front) == ["second", "first", "third"]


def test_whoever_is_gone_is_nowhere() -> None:
    front = line()
    for name in ("first", "nobody"):
        front.remove(name)
        front.remove(name)
        assert name not in front
    assert front.in_order() == ["second", "third"]
    assert front.first == "second"
    assert [front.num_of(each) for each in RequestClass] == [1, 1, 0]
    for name in ("second", "third"):
        front.remove(name)
    assert front.first is None
    assert len(front) == 0


def test_it_is_in_the_order_in_which_they_came_whatever_happens() -> None:
    rng, front = random.Random(1), FrontLine[int]()
    there = set[int]()
    for arrival in range(2000):
        if there and rng.random() < 0.5:
            gone = rng.choice(sorted(there))
            there.remove(gone)
            front.remove(gone)
        came = arrival - rng.randrange(50)
        if came in front:
            continue
        front.add(came, came, STANDARD)
        there.add(came)
        assert front.in_order() == sorted(there)
        assert front.first == min(there)
        assert front.num_of(STANDARD) == len(front) == len(there)

"""Who waits before all that have fair turns. Pure."""

import random

from diptych.request_class import RequestClass
from router.placement.front_line import FrontLine

REALTIME, STANDARD, BATCH = RequestClass


def line() -> FrontLine[str]:
    """Two that were placed once, came early and return late; and choices of others."""
    front = FrontLine[str]()
    front.add("choice", 10, STANDARD, has_slot=False)
    front.add("of a batch", 11, BATCH, has_slot=False)
    front.add("another", 12, REALTIME, has_slot=False)
    front.add("late", 11, STANDARD, has_slot=True)
    front.add("early", 3, BATCH, has_slot=True)
    return front


def test_they_are_asked_as_they_came_and_a_batchs_choices_behind_turns() -> None:
    front = line()
    assert list(front.before(5)) == ["early", "choice", "late", "another"]
    assert list(front.behind(5)) == ["of a batch"]
    assert front.first == "early"


def test_without_slots_nobody_is_asked_who_needs_one() -> None:
    front = line()
    assert list(front.before(0)) == ["early", "late"]
    assert list(front.behind(0)) == []


def test_whoever_was_asked_is_the_last_of_those_with_slots() -> None:
    front = line()
    assert list(front.slotted) == ["late", "early"]
    front.asked("late")
    front.asked("choice")
    assert list(front.slotted) == ["early", "late"]


def test_whoever_is_gone_is_nowhere() -> None:
    front = line()
    for name in ("early", "choice", "of a batch", "nobody"):
        front.remove(name)
        front.remove(name)
        assert name not in front
    assert list(front.before(5)) == ["late", "another"]
    assert front.first == "late"
    assert [front.num_of(each) for each in RequestClass] == [1, 1, 0]
    front.remove("late")
    assert front.first == "another"
    front.remove("another")
    assert front.first is None


def test_it_is_in_the_order_in_which_they_came_whatever_happens() -> None:
    rng, front = random.Random(1), FrontLine[int]()
    there: dict[int, bool] = {}
    for arrival in range(2000):
        if there and rng.random() < 0.5:
            gone = rng.choice(list(there))
            del there[gone]
            front.remove(gone)
        has_slot = rng.random() < 0.3
        came = arrival - rng.randrange(50) if has_slot else arrival
        if came in front:
            continue
        front.add(came, came, STANDARD, has_slot=has_slot)
        there[came] = has_slot
        with_slots = sorted(each for each, has in there.items() if has)
        assert list(front.before(0)) == with_slots
        assert list(front.before(2000)) == sorted(there)
        assert front.first == min(there)
        assert front.num_of(STANDARD) == len(there)

"""What was taken while nobody waited is nobody's debt; while others wait it is."""

import gc
import itertools
from contextlib import closing
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.request_class import RequestClass
from router.placement.account import Account
from router.placement.fair_queue import (
    DEFAULT_WEIGHTS,
    MAX_IDLE_TENANTS,
    FairQueue,
    Turn,
)

REALTIME, STANDARD, BATCH = RequestClass
A, B = Turn(STANDARD, "a"), Turn(STANDARD, "b")
URGENT, LINES = Turn(REALTIME, "a"), Turn(BATCH, "b")
PAIRS = [(A, B), (B, A), (URGENT, LINES), (LINES, URGENT)]  # tenants of a class, and classes


def share(one: Turn, other: Turn) -> float:
    """Of ``one``, by weight; within a class alike."""
    weights = [DEFAULT_WEIGHTS[each.request_class] for each in (one, other)]
    return weights[0] / sum(weights)


class Fair:
    """A queue, and what goes from it; each takes what it is expected to, if it is not said."""

    def __init__(self) -> None:
        self.queue: FairQueue[int] = FairQueue()
        self.turns: dict[int, Turn] = {}
        self._numbers = itertools.count()

    def come(self, turn: Turn, num: int = 1) -> None:
        for number in itertools.islice(self._numbers, num):
            self.turns[number] = turn
            self.queue.add(number, turn, 0.0)

    def go(self) -> tuple[Turn, int]:
        """The next one."""
        with closing(self.queue.in_turn(0.0)) as line:
            number = next(line)
            self.queue.remove(number)
            turn = self.turns.pop(number)
            return turn, self.queue.charge(turn)

    def take(self, turn: Turn, used_s: float, num: int) -> None:
        """Each waits for a moment; all end when nobody waits."""
        charges = []
        for _ in range(num):
            self.come(turn)
            charges.append(self.go()[1])
        for charged in charges:
            self.queue.settle(turn, used_s, charged)

    def take_beside(self, turn: Turn, used_s: float) -> None:
        """One goes without a turn, and ends."""
        self.queue.settle(turn, used_s, self.queue.charge(turn))

    def compete(self, first: Turn, second: Turn, num_turns: int = 90) -> float:
        """The part that ``second`` has of so many turns; ``first`` waits a moment sooner."""
        for turn in (first, second):
            self.come(turn, num_turns)
        gone = [self.go()[0] for _ in range(num_turns)]
        return gone.count(second) / num_turns


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_who_took_more_than_expected_while_nobody_waited_owes_nobody(
    first: Turn, second: Turn
) -> None:
    fair = Fair()
    fair.take(second, 10.0, 200)
    assert fair.compete(first, second) == pytest.approx(share(second, first), abs=0.02)


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_what_goes_without_a_turn_while_nobody_waits_is_no_debt(first: Turn, second: Turn) -> None:
    """As the further choices of a request."""
    fair = Fair()
    fair.take(second, 1.0, 1)
    for _ in range(500):
        fair.queue.charge(second)
    assert fair.compete(first, second) == pytest.approx(share(second, first), abs=0.02)


@pytest.mark.parametrize(("first", "second"), PAIRS)
@pytest.mark.parametrize("is_served", [True, False])
def test_a_debt_ends_once_nobody_waits(first: Turn, second: Turn, is_served: bool) -> None:
    """Whether the last one that waited had its turn or gave up."""
    fair = Fair()
    fair.take(second, 1.0, 1)
    fair.come(first)
    for _ in range(500):
        fair.queue.charge(second)
    if is_served:
        assert fair.go()[0] == first
    else:
        fair.queue.remove(*fair.turns)
    assert fair.compete(first, second) == pytest.approx(share(second, first), abs=0.02)


@pytest.mark.parametrize("is_served", [True, False])
def test_the_debt_of_the_last_one_that_waited_ends_too(is_served: bool) -> None:
    """It was charged while only its own waited."""
    fair = Fair()
    fair.come(A)
    for _ in range(500):
        fair.queue.charge(A)
    if is_served:
        fair.go()
    else:
        fair.queue.remove(*fair.turns)
    assert fair.compete(B, A) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_debt_is_paid_while_others_wait(first: Turn, second: Turn) -> None:
    """However often who owes comes and gives up meanwhile."""
    fair = Fair()
    fair.come(second)
    charged = fair.go()[1]
    fair.come(first, 300)
    fair.queue.settle(second, 101.0, charged)
    for _ in range(3):
        fair.come(second)
        number = max(fair.turns)
        del fair.turns[number]
        fair.queue.remove(number)
    owed = 100 * DEFAULT_WEIGHTS[first.request_class] / DEFAULT_WEIGHTS[second.request_class]
    fair.come(second, 300)
    gone = [fair.go()[0] for _ in range(300)]
    assert gone.count(second) == 0 if owed > 300 else gone.index(second) == pytest.approx(owed, 0.1)


def test_tenants_of_a_class_owe_each_other_nothing_while_only_others_wait() -> None:
    fair = Fair()
    fair.come(A)
    charged = fair.go()[1]
    fair.come(LINES, 50)
    fair.queue.settle(A, 1000.0, charged)
    for turn in (B, A):
        fair.come(turn, 200)
    while fair.queue.num_waiting(STANDARD) > 200:
        fair.go()
    left = list(fair.turns.values())
    assert abs(left.count(A) - left.count(B)) <= 1


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_what_is_given_back_of_what_nobody_waited_for_puts_before_nobody(
    first: Turn, second: Turn
) -> None:
    """Who comes first is lifted to what the other was charged, so that is not its debt."""
    fair, costly = Fair(), second._replace(cost_s=20.0)
    charges = []
    for _ in range(16):
        fair.come(costly)
        charges.append(fair.go()[1])
    for turn in (first, second):
        fair.come(turn, 180)
    for charged in charges:
        fair.queue.settle(costly, 0.5, charged)
    gone = [fair.go()[0] for _ in range(180)]
    assert gone.count(second) / 180 == pytest.approx(share(second, first), abs=0.02)


@pytest.mark.parametrize(
    ("always", "costly", "third"),
    [
        (A, B._replace(cost_s=20.0), Turn(STANDARD, "c")),
        (A, Turn(REALTIME, "b", 40.0), LINES),
    ],
)
def test_who_comes_back_while_others_wait_costs_these_nothing(
    always: Turn, costly: Turn, third: Turn
) -> None:
    """He is lifted to them, and what one of them gets back counts in full."""
    fair, cheap = Fair(), costly._replace(cost_s=1.0)
    for turn in (always, cheap):
        fair.come(turn, 200)
    charged = fair.queue.charge(costly)
    before = [fair.go()[0] for _ in range(20)]
    assert before.count(cheap) <= 1, "it was charged already"
    fair.come(third, 100)
    fair.queue.settle(costly, 0.5, charged)
    after = [fair.go()[0] for _ in range(18)]
    assert after.count(cheap) >= 17, "it has its seconds back"


@pytest.mark.parametrize(("first", "second"), PAIRS)
@pytest.mark.parametrize("is_back", [False, True])
def test_who_is_lifted_to_one_that_was_charged_too_much_does_not_wait_for_what_that_gets_back(
    first: Turn, second: Turn, is_back: bool
) -> None:
    """``second`` floods; its first answers were expected to be longer."""
    fair, costly = Fair(), second._replace(cost_s=20.0)
    fair.come(costly, 16)
    fair.come(second, 400)
    charges = [fair.go()[1] for _ in range(16)]
    fair.come(first)
    if is_back:  # it has had a turn, and nothing of it waits when the seconds are given back
        while any(turn == first for turn in fair.turns.values()):
            fair.go()
    for charged in charges:
        fair.queue.settle(costly, 1.0, charged)
    fair.come(first, 60)
    gone = [fair.go()[0] for _ in range(60)]
    assert gone.count(first) / 60 == pytest.approx(share(first, second), abs=0.05)


def test_thousands_who_were_lifted_one_to_the_other_all_follow() -> None:
    fair = Fair()
    long = fair.queue.charge(Turn(STANDARD, "0", 1000.0))
    for number in range(MAX_IDLE_TENANTS):
        fair.come(Turn(STANDARD, str(number), 0.001))
        if number:
            fair.go()
    fair.queue.settle(Turn(STANDARD, "0", 1000.0), 1.0, long)
    fair.come(A)
    assert fair.go()[0].tenant == str(MAX_IDLE_TENANTS - 1)


@pytest.mark.parametrize(
    ("low", "high", "third"),
    [(A, B, Turn(STANDARD, "c")), (LINES, A, Turn(REALTIME, "c"))],
)
def test_nobody_follows_to_before_one_who_came_when_nobody_waited(
    low: Turn, high: Turn, third: Turn
) -> None:
    fair, costly = Fair(), high._replace(cost_s=100.0)
    fair.come(costly)
    charged = fair.go()[1]
    fair.come(high)
    fair.come(low)
    while fair.turns:
        fair.go()
    fair.come(third, 90)
    fair.come(low, 90)
    fair.queue.settle(costly, 1.0, charged)
    gone = [fair.go()[0] for _ in range(90)]
    assert gone.count(third) / 90 == pytest.approx(share(third, low), abs=0.05)


@pytest.mark.parametrize("is_first", [False, True])
def test_how_far_one_follows_does_not_depend_on_who_ends_first(is_first: bool) -> None:
    """Both were charged too much, and one was lifted to the other."""
    fair, short, long = Fair(), A._replace(cost_s=90.0), B._replace(cost_s=100.0)
    charges = []
    for turn in (short, long):
        fair.come(turn)
        charges.append((turn, fair.go()[1]))
    fair.come(B, 200)
    fair.come(A, 200)
    for turn, charged in charges if is_first else reversed(charges):
        fair.queue.settle(turn, 1.0, charged)
    gone = [fair.go()[0] for _ in range(200)]
    assert gone.count(A) == pytest.approx(100, abs=6)


def test_accounts_that_follow_each_other_are_forgotten_with_their_tenants() -> None:
    """However many come one after the other, each lifted to the one before."""
    num_before = num_accounts()  # of other tests
    fair = Fair()
    for number in range(3 * MAX_IDLE_TENANTS):
        fair.come(Turn(STANDARD, str(number)))
        if number:
            fair.go()
    assert num_accounts() - num_before <= MAX_IDLE_TENANTS + 2 + len(RequestClass)


def num_accounts() -> int:
    """That are alive in this process."""
    gc.collect()
    return sum(isinstance(each, Account) for each in gc.get_objects())


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_who_comes_back_is_lifted_to_those_that_wait_and_not_to_who_owes_them(
    first: Turn, second: Turn
) -> None:
    fair, third = Fair(), Turn(STANDARD, "c")
    fair.come(first, 400)
    fair.take_beside(second, 1000.0)
    fair.come(third, 400)
    gone = [fair.go()[0] for _ in range(100)]
    assert gone.count(third) == pytest.approx(100 * share(third, first), abs=2)


class Step(NamedTuple):
    """One request of the past."""

    turn: Turn
    used_s: float
    is_front: bool  # it had no turn
    ends_late: bool  # after those that wait have gone


STEPS = st.builds(
    Step,
    st.builds(
        Turn,
        st.sampled_from(RequestClass),
        st.sampled_from("abc"),
        st.floats(0.1, 50.0),
    ),
    st.floats(0.0, 500.0),
    st.booleans(),
    st.booleans(),
)


@settings(max_examples=80, deadline=None)
@given(past=st.lists(STEPS, max_size=30), pair=st.sampled_from(PAIRS))
def test_where_nobody_waits_the_past_does_not_matter(
    past: list[Step], pair: tuple[Turn, Turn]
) -> None:
    fair, late = Fair(), []
    for step in past:
        if not step.is_front:
            fair.come(step.turn)
        charged = fair.queue.charge(step.turn)
        if step.ends_late:
            late.append((step, charged))
        else:
            fair.queue.settle(step.turn, step.used_s, charged)
    for number in fair.turns:
        fair.queue.remove(number)
    fair.turns.clear()
    for step, charged in late:
        fair.queue.settle(step.turn, step.used_s, charged)
    first, second = pair
    assert fair.compete(first, second) == pytest.approx(share(second, first), abs=0.02)

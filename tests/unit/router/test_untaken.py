"""What waits for clients has a bound together, and who is slow is cut off for it."""

import logging
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from diptych.errors import QueueFullError
from router.frontend.handed_over import FREE_BYTES, HandedOver
from router.untaken import PORTION_BYTES, SLOW_S, Cut, Taker, Untaken

MOST = 40 * PORTION_BYTES
MOST_SLOW = 10 * PORTION_BYTES
LARGE = 6 * PORTION_BYTES


class World:
    def __init__(self) -> None:
        self.now = 100.0
        self.cuts: list[Cut] = []
        self.untaken = Untaken(lambda: self.now, MOST, self.cuts.append)
        self.ended: list[str] = []

    def client(self, name: str, look: Callable[[], None] = lambda: None) -> Taker:
        return self.untaken.open(name, look, lambda why: self.ended.append(name))

    @property
    def cut(self) -> list[str]:
        return [each.client for each in self.cuts]


def test_what_fits_cuts_nobody_however_long_it_waits() -> None:
    world = World()
    world.client("a").wait(MOST_SLOW - 10)
    world.now += 10**6
    world.client("b").wait(10)
    assert world.cut == []


def test_who_holds_most_for_longest_goes_first_and_no_more_than_need_to() -> None:
    world = World()
    small, large = world.client("small"), world.client("large")
    small.wait(PORTION_BYTES)
    large.wait(LARGE)
    world.now += 2 * SLOW_S
    fresh = world.client("fresh")
    fresh.wait(LARGE)
    assert world.cut == world.ended == ["large"]
    assert world.cuts[0] == Cut("large", "", LARGE, 2 * SLOW_S)
    assert (large.was_cut, small.was_cut, fresh.was_cut) == (True, False, False)
    assert world.untaken.num_bytes == LARGE + PORTION_BYTES


def test_who_reads_on_is_not_cut_off_while_others_are_slow() -> None:
    world = World()
    stuck, reading = world.client("stuck"), world.client("reading")
    stuck.wait(LARGE)
    reading.wait(2 * LARGE)
    for _ in range(8):
        world.now += SLOW_S - 0.1
        reading.take(PORTION_BYTES)
        reading.wait(1)
    assert world.cut == ["stuck"]


def test_a_sum_that_nobody_slow_makes_up_has_a_bound_too() -> None:
    world = World()
    clients = [world.client(str(index)) for index in range(8)]
    for client in clients:
        world.now += 0.1
        client.wait(LARGE)
    assert world.cut == ["0", "1"], "the first, which held as much for longer; then the second"
    assert world.untaken.num_bytes <= MOST


def test_what_was_taken_and_not_told_counts() -> None:
    """A large piece leaves a connection bit by bit, which is not told each time."""
    world = World()
    reading = world.client("reading", lambda: reading.take(2 * PORTION_BYTES))
    stuck = world.client("stuck")
    reading.wait(3 * LARGE)
    stuck.wait(PORTION_BYTES)
    world.now += 2 * SLOW_S
    world.client("new").wait(1)
    assert world.cut == ["stuck"]


def test_it_ends_by_what_is_under_way_if_anything_is() -> None:
    world = World()
    client, told = world.client("a"), list[str]()
    with client.ending_by(told.append):
        client.wait(MOST + 1)
    assert (world.ended, len(told)) == ([], 1)
    assert str(MOST + 1) in told[0]
    other = world.client("b")
    with other.ending_by(told.append):
        other.wait(1)
    other.wait(MOST)
    assert world.ended == ["b"]
    other.wait(1)
    other.take(1)
    other.leave()
    assert world.untaken.num_bytes == 0, "of who was cut off nothing counts"


class Sums(RuleBasedStateMachine):
    """The sum is that of what each holds, and has its bound."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.clients = [self.world.client(str(index)) for index in range(5)]
        self.held = [0] * 5

    @rule(index=st.integers(0, 4), num=st.integers(0, 2 * LARGE))
    def wait(self, index: int, num: int) -> None:
        if not self.clients[index].was_cut:
            self.held[index] += num
            self.clients[index].wait(num)

    @rule(index=st.integers(0, 4), num=st.integers(0, LARGE))
    def take(self, index: int, num: int) -> None:
        taken = min(num, self.held[index])
        self.held[index] -= taken
        self.clients[index].take(taken)

    @rule(seconds=st.floats(0.0, 2 * SLOW_S))
    def pass_time(self, seconds: float) -> None:
        self.world.now += seconds

    @rule(index=st.integers(0, 4))
    def come_anew(self, index: int) -> None:
        self.clients[index].leave()
        self.clients[index], self.held[index] = self.world.client(str(index)), 0

    @invariant()
    def adds_up(self) -> None:
        for index, client in enumerate(self.clients):
            if client.was_cut:
                self.held[index] = 0
            assert client.num_bytes == self.held[index]
        assert self.world.untaken.num_bytes == sum(self.held) <= MOST
        assert len(self.world.ended) == len(self.world.cuts)


Sums.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestSums = Sums.TestCase


def test_who_is_cut_off_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    slow = Untaken(lambda: 0.0, 10).open("10.0.0.1:5")
    with caplog.at_level(logging.WARNING):
        slow.wait(11)
    (said,) = caplog.records
    assert said.message.startswith("a client was cut off")
    assert {name: said.__dict__[name] for name in Cut._fields} == {
        "client": "10.0.0.1:5", "request_id": "", "num_bytes": 11, "since_s": 0.0,
    }  # fmt: skip


def test_one_tenant_fills_half_of_what_grpc_keeps_and_others_have_room() -> None:
    handed, releases = HandedOver(MOST), []
    size = PORTION_BYTES + FREE_BYTES
    while handed.num_bytes < MOST // 2:
        handed.admit("greedy")
        releases.append(handed.hold("greedy", size))
    with pytest.raises(QueueFullError):
        handed.admit("greedy")
    handed.hold("greedy", FREE_BYTES)()
    handed.admit("other")
    releases.append(handed.hold("other", 2 * MOST))  # nobody knew its size before
    with pytest.raises(QueueFullError):
        handed.admit("third")
    for release in releases:
        release()
    assert handed.num_bytes == 0
    handed.admit("greedy")

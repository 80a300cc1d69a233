"""Who goes next: shares of seconds by class and tenant, whoever comes when and with how much."""

import heapq
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from diptych.request_class import RequestClass
from router.placement.fair_queue import MAX_IDLE_TENANTS, FairQueue, Turn

REALTIME, STANDARD, BATCH = RequestClass
Key = tuple[RequestClass, str]


class Engine:
    """Serves one at a time, in virtual time; what is charged is corrected when it is done."""

    def __init__(self) -> None:
        self.queue: FairQueue[int] = FairQueue()
        self.now_s = 0.0
        self.served_s: defaultdict[Key, float] = defaultdict(float)
        self.order: list[int] = []
        self._turns: dict[int, tuple[Turn, float]] = {}
        self._numbers = itertools.count()

    def add(self, turn: Turn, used_s: float | None = None) -> int:
        """One that comes now and will take ``used_s``; as expected if that is None."""
        number = next(self._numbers)
        self._turns[number] = (turn, turn.cost_s if used_s is None else used_s)
        self.queue.add(number, turn, self.now_s)
        return number

    def serve(self) -> int:
        """The next one, to its end."""
        with closing(self.queue.in_turn(self.now_s)) as line:
            number = next(line)
            turn, used_s = self._turns.pop(number)
            self.queue.remove(number)
            self.queue.charge(turn)
        self.now_s += used_s
        self.queue.settle(turn, used_s)
        self.served_s[turn.request_class, turn.tenant] += used_s
        self.order.append(number)
        return number

    def run(self, until_s: float, sources: list[Callable[[], None]]) -> None:
        """Serve, each source called before each; they keep their own backlogs."""
        while self.now_s < until_s:
            for source in sources:
                source()
            self.serve()

    def share(self, key: Key) -> float:
        return self.served_s[key] / sum(self.served_s.values())


def backlog(
    engine: Engine,
    request_class: RequestClass,
    tenant: str,
    sizes: Iterator[float],
    *,
    error: float = 1.0,
    depth: int = 5,
) -> Callable[[], None]:
    """Keeps so many waiting; each takes ``error`` times what was expected."""
    waiting: set[int] = set()

    def fill() -> None:
        waiting.difference_update([each for each in waiting if each not in engine.queue])
        while len(waiting) < depth:
            size = next(sizes)
            waiting.add(engine.add(Turn(request_class, tenant, size), size * error))

    return fill


def drawn(seed: int, low: float = 0.05, high: float = 0.4) -> Iterator[float]:
    chance = random.Random(seed)
    return (chance.uniform(low, high) for _ in itertools.count())


@pytest.mark.parametrize(
    ("one", "other", "share"),
    [(STANDARD, STANDARD, 1 / 2), (REALTIME, BATCH, 8 / 9), (REALTIME, STANDARD, 2 / 3)],
)
@pytest.mark.parametrize(("small", "error"), [(0.05, 1.0), (0.01, 1.0), (0.05, 3.0)])
def test_two_that_always_wait_share_by_weight(
    one: RequestClass, other: RequestClass, share: float, small: float, error: float
) -> None:
    """However large the requests are and however wrong is what was expected of one's."""
    engine = Engine()
    ours = backlog(engine, one, "a", drawn(1, small, 8 * small), error=error)
    theirs = backlog(engine, other, "b", drawn(2))
    engine.run(60.0, [ours, theirs])
    assert engine.share((one, "a")) == pytest.approx(share, rel=0.05)


def test_a_tenant_that_comes_back_saved_nothing_up() -> None:
    engine = Engine()
    always = backlog(engine, STANDARD, "a", drawn(1))
    often = backlog(engine, STANDARD, "b", drawn(2))
    engine.run(5.0, [always, often])
    while any(each in engine.queue for each in range(10_000)):  # both go idle; then a alone
        engine.serve()
    engine.run(65.0, [always])
    engine.served_s.clear()
    engine.run(75.0, [always, often])
    assert 0.45 <= engine.share((STANDARD, "b")) <= 0.55


def test_a_class_that_comes_back_saved_nothing_up() -> None:
    engine = Engine()
    engine.run(60.0, [backlog(engine, BATCH, "a", drawn(1))])
    engine.served_s.clear()
    both = [backlog(engine, BATCH, "a", drawn(1)), backlog(engine, STANDARD, "b", drawn(2))]
    engine.run(90.0, both)
    assert engine.share((STANDARD, "b")) == pytest.approx(0.8, rel=0.05)


def test_batch_below_saturating_realtime_has_its_weight() -> None:
    """Of however many tenants realtime is."""
    engine = Engine()
    urgent = [backlog(engine, REALTIME, f"r{n}", drawn(n), depth=3) for n in range(40)]
    engine.run(120.0, [*urgent, backlog(engine, BATCH, "b", drawn(99))])
    assert engine.share((BATCH, "b")) >= 0.9 / 9
    shares = [engine.served_s[REALTIME, f"r{n}"] for n in range(40)]
    assert max(shares) - min(shares) <= 2 * 0.4


@pytest.mark.parametrize("tenant", ["large", "small"])
def test_a_large_request_is_not_starved_by_small_ones(tenant: str) -> None:
    engine = Engine()
    flood = backlog(engine, STANDARD, "small", itertools.repeat(0.05), depth=20)
    engine.run(5.0, [flood])
    large = engine.add(Turn(STANDARD, tenant, 40.0))
    before = len(engine.order)
    while large in engine.queue:
        flood()
        engine.serve()
    assert len(engine.order) - before <= 22, "those that were there, and hardly one more"


def test_one_tenants_go_by_when_they_are_due_and_those_that_wait_long_grow_old() -> None:
    engine = Engine()
    plain = engine.add(Turn(cost_s=1.0))
    far = engine.add(Turn(cost_s=1.0, due_s=1000.0))
    soon = engine.add(Turn(cost_s=1.0, due_s=3.0))
    assert [engine.serve(), engine.serve(), engine.serve()] == [soon, plain, far]
    old, came_s = engine.add(Turn(cost_s=1.0, due_s=1000.0)), engine.now_s
    while old in engine.queue:
        engine.add(Turn(cost_s=1.0, due_s=engine.now_s + 1.0))
        engine.serve()
    assert engine.now_s == came_s + 10.0, "after ten seconds it is due, whatever comes"


def test_the_hopeless_go_last_and_are_not_forgotten() -> None:
    engine = Engine()
    hopeless = engine.add(Turn(due_s=1.0, latest_start_s=-0.5))
    hopeful = [engine.add(Turn(due_s=9.0, latest_start_s=8.0)) for _ in range(2)]
    assert [engine.serve() for _ in range(3)] == [*hopeful, hopeless]
    late = engine.add(Turn(due_s=4.0, latest_start_s=3.5))
    engine.now_s = 6.0
    for _ in range(12):
        engine.add(Turn(due_s=engine.now_s + 2.0, latest_start_s=engine.now_s + 1.5))
        engine.serve()
    assert late not in engine.queue, "later ones are due after it"


@pytest.mark.parametrize("request_class", [STANDARD, BATCH])
def test_what_is_given_back_after_a_pause_is_not_saved_up(request_class: RequestClass) -> None:
    """Sixteen are charged, the other works on alone, then all sixteen are cancelled."""
    queue: FairQueue[str] = FairQueue()
    costly, cheap = Turn(request_class, "a", 20.0), Turn(request_class, "a", 1.0)
    charges = []
    for _ in range(16):
        queue.add("a", costly, 0.0)
        queue.remove("a")
        charges.append(queue.charge(costly))
    other = Turn(STANDARD, "b", 1.0)
    queue.add("b", other, 0.0)
    for _ in range(2000):
        queue.charge(other)
    queue.add("a", cheap, 0.0)
    for charged in charges:
        queue.settle(costly, 0.5, charged)
    placed = []
    while "b" not in placed:
        with closing(queue.in_turn(0.0)) as line:
            placed.append(next(line))
        queue.charge(cheap)
    assert len(placed) <= 2, "the other has its turn soon"


def test_what_is_given_back_without_a_pause_counts_in_full() -> None:
    queue: FairQueue[str] = FairQueue()
    costly = Turn(STANDARD, "a", 20.0)
    for name in "ab":
        queue.add(name, Turn(STANDARD, name, 1.0), 0.0)
    charged = queue.charge(costly)
    queue.charge(Turn(STANDARD, "b", 2.0))
    queue.settle(costly, 0.5, charged)
    with closing(queue.in_turn(0.0)) as line:
        assert next(line) == "a"


def test_who_is_offered_in_vain_lets_others_be_offered_next() -> None:
    queue: FairQueue[str] = FairQueue()
    for name in ("a1", "a2", "b1", "c1", "c2"):
        queue.add(name, Turn(tenant=name[0]), 0.0)
    with closing(queue.in_turn(0.0)) as line:
        assert list(line) == ["a1", "b1", "c1", "a2", "c2"]
    with closing(queue.in_turn(0.0)) as line:
        assert next(line) == "a1"
        queue.remove("a1")
        queue.charge(Turn(tenant="a"))
        assert [next(line), next(line), next(line)] == ["b1", "c1", "a2"], "it was charged"
    assert sorted(queue.in_turn(0.0)) == ["a2", "b1", "c1", "c2"]


def test_who_is_turned_away_is_of_the_longest() -> None:
    queue: FairQueue[str] = FairQueue()
    for name in ("light1", "flood1", "flood2", "flood3", "light2"):
        queue.add(name, Turn(tenant=name[:5]), 0.0)
    gone = []
    while queue:
        gone.append(queue.newest_of_longest())
        queue.remove(gone[-1])
    assert gone == ["flood3", "flood2", "light2", "light1", "flood1"]


def test_what_goes_before_one_that_comes_now() -> None:
    queue: FairQueue[int] = FairQueue()
    numbers = itertools.count()

    def wait(request_class: RequestClass, tenant: str, *costs: float) -> None:
        for cost_s in costs:
            queue.add(next(numbers), Turn(request_class, tenant, cost_s), 0.0)

    assert queue.ahead_s(Turn(STANDARD, "a", 1.0)) == 0.0
    wait(STANDARD, "a", 1.0, 2.0, 3.0)
    assert queue.ahead_s(Turn(STANDARD, "a", 1.0)) == 6.0, "one tenant, one class: all that waits"
    assert queue.ahead_s(Turn(STANDARD, "b", 1.0)) == 1.0, "as much of another's as is its own"
    wait(REALTIME, "a", 5.0)
    assert queue.ahead_s(Turn(STANDARD, "b", 1.0)) == 1.0 + 4.0
    assert queue.ahead_s(Turn(BATCH, "b", 1.0)) == 4.0 + 5.0
    assert queue.ahead_s(Turn(REALTIME, "b", 1.0)) == 1.0 + 1.0


def test_thousands_that_wait_cost_an_operation_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 6,000 that wait, by 2,000 tenants: taking one touches few heaps, and looks at few."""
    queue: FairQueue[int] = FairQueue()
    turns = [Turn(list(RequestClass)[n % 3], f"t{n % 2000}", 1.0 + n % 7) for n in range(6_000)]
    for number, turn in enumerate(turns):
        queue.add(number, turn, 0.0)
    touched = Counter[str]()

    def counted(name: str) -> Callable[..., Any]:
        real = getattr(heapq, name)

        def call(*args: Any) -> Any:
            touched[name] += 1
            return real(*args)

        return call

    for name in ("heappush", "heappop", "heapify"):
        monkeypatch.setattr(heapq, name, counted(name))
    for _ in range(500):
        with closing(queue.in_turn(0.0)) as line:
            number = next(line)
            queue.remove(number)
            queue.charge(turns[number])
        queue.settle(turns[number], 2.0)
        queue.ahead_s(turns[number])
    assert touched["heappush"] + touched["heappop"] <= 500 * 6
    assert touched["heapify"] <= 6


def test_tenants_that_are_gone_are_forgotten() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(5 * MAX_IDLE_TENANTS):
        turn = Turn(tenant=f"t{number}")
        queue.add(number, turn, 0.0)
        queue.remove(number)
        queue.charge(turn)
        queue.settle(turn, 3.0)
    assert len(queue._lines[STANDARD]._tenants) <= MAX_IDLE_TENANTS
    assert len(queue._lines[STANDARD]._heap) <= 100


class FairMachine(RuleBasedStateMachine):
    """Requests come, go, give up; tenants are idle for a while, expectations are wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[int] = FairQueue()
        self.now_s = 0.0
        self.turns: dict[int, Turn] = {}
        self.running: list[tuple[Turn, float]] = []
        self.numbers = itertools.count()

    @rule(
        request_class=st.sampled_from(RequestClass),
        tenant=st.sampled_from("abc"),
        cost_s=st.floats(0.1, 5.0),
        due_in_s=st.none() | st.floats(-1.0, 30.0),
    )
    def come(
        self, request_class: RequestClass, tenant: str, cost_s: float, due_in_s: float | None
    ) -> None:
        due_s = None if due_in_s is None else self.now_s + due_in_s
        number = next(self.numbers)
        self.turns[number] = Turn(request_class, tenant, cost_s, due_s, due_s)
        self.queue.add(number, self.turns[number], self.now_s)

    @rule(num_in_vain=st.integers(0, 3), used=st.floats(0.2, 4.0))
    def one_goes(self, num_in_vain: int, used: float) -> None:
        with closing(self.queue.in_turn(self.now_s)) as line:
            for number in itertools.islice(line, num_in_vain, None):
                self.queue.remove(number)
                turn = self.turns.pop(number)
                self.queue.charge(turn)
                self.running.append((turn, used * turn.cost_s))
                break

    @rule()
    def one_ends(self) -> None:
        if self.running:
            self.queue.settle(*self.running.pop(0))

    @rule(data=st.data())
    def one_gives_up(self, data: st.DataObject) -> None:
        if self.turns:
            number = data.draw(st.sampled_from(sorted(self.turns)))
            del self.turns[number]
            self.queue.remove(number)
            self.queue.remove(number)

    @rule(seconds=st.floats(0.0, 20.0))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def each_that_waits_is_named_once(self) -> None:
        with closing(self.queue.in_turn(self.now_s)) as line:
            named = list(line)
        assert sorted(named) == sorted(self.turns)
        assert len(self.queue) == len(self.turns)
        for each in RequestClass:
            alike = [turn for turn in self.turns.values() if turn.request_class is each]
            assert self.queue.num_waiting(each) == len(alike)

    @invariant()
    def the_longest_is_the_longest(self) -> None:
        if self.turns:
            lengths = Counter((turn.request_class, turn.tenant) for turn in self.turns.values())
            turn = self.turns[self.queue.newest_of_longest()]
            assert lengths[turn.request_class, turn.tenant] == max(lengths.values())

    @invariant()
    def what_is_ahead_is_no_more_than_what_waits(self) -> None:
        waiting_s = sum(turn.cost_s for turn in self.turns.values())
        for request_class in RequestClass:
            ahead_s = self.queue.ahead_s(Turn(request_class, "a", 1.0))
            assert -1e-6 <= ahead_s <= waiting_s + 1e-6


TestFairQueue = FairMachine.TestCase
TestFairQueue.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)

"""Who is refused by what is foretold: nobody who was placed, and each as soon as it is certain."""

import pytest

from diptych.errors import DeadlineUnreachableError, DiptychError
from router.placement.placement import Unreachable
from router.placement.query import Query
from router.request import actions, events
from tests.unit.router.request.world import World

LOST = Unreachable("the first token is wanted within 1 s and foretold in 3 s", 2.5)
DUE_S = 105.0


class Oracle:
    """Says what is foretold, and remembers who asked."""

    def __init__(self, says: Unreachable | None) -> None:
        self.says = says
        self.asked: list[tuple[Query, bool]] = []

    def __call__(self, query: Query, is_new: bool) -> Unreachable | None:
        self.asked.append((query, is_new))
        return self.says


def begun(
    oracle: Oracle | None,
    *,
    is_full: bool = True,
    front: bool = False,
    resumed: tuple[int, ...] = (),
) -> World:
    world = World(foresee=oracle, first_token_due_s=DUE_S, resumed=resumed)
    world.is_full = is_full
    world.on(events.Begin(front))
    return world


def assert_refused(world: World) -> None:
    assert isinstance(world.outcome, DeadlineUnreachableError)
    assert world.outcome.retry_after_s == LOST.retry_after_s
    assert not world.queued
    assert not world.leases
    assert not world.reservations


def test_who_is_lost_when_it_comes_is_refused_before_anything_is_done() -> None:
    oracle = Oracle(LOST)
    world = begun(oracle)
    assert_refused(world)
    assert [type(action) for action in world.log] == [actions.Fail]
    assert [is_new for _, is_new in oracle.asked] == [True]
    assert world.num_asked == 0, "no placement was asked for"


def test_who_is_lost_at_its_turn_is_refused_and_who_is_not_waits_on() -> None:
    oracle = Oracle(None)
    world = begun(oracle)
    world.on(events.Offered(room_made=False))
    assert world.queued
    oracle.says = LOST
    world.on(events.Offered(room_made=False))
    assert_refused(world)
    assert [is_new for _, is_new in oracle.asked] == [True, False, False, False]


def test_who_is_never_offered_anything_is_judged_when_its_first_token_is_due() -> None:
    oracle = Oracle(None)
    world = World(foresee=oracle, first_token_due_s=DUE_S)
    wanted = world.machine.handle(events.Begin(front=False))  # and no pump
    assert [type(action) for action in wanted] == [actions.Enqueue]
    world.queued = True
    assert world.machine.wake_at_s == DUE_S
    oracle.says, world.now = LOST, DUE_S
    world.on(events.Tick())
    assert_refused(world)
    assert world.num_asked == 0


def test_who_is_late_and_may_not_be_refused_is_judged_once_and_waits_on() -> None:
    oracle = Oracle(None)
    world = begun(oracle)
    world.now = DUE_S
    world.on(events.Tick())
    assert world.queued
    assert world.machine.wake_at_s is not None
    assert world.machine.wake_at_s > DUE_S, "it is not judged again and again"


def test_who_waits_for_better_objectives_asks_again_though_nothing_happens() -> None:
    """Other routers' requests end, and nobody tells."""
    world = begun(Oracle(None))
    again_s = world.machine.wake_at_s
    assert again_s is not None
    assert world.now < again_s < DUE_S
    num_asked, world.now = world.num_asked, again_s
    world.on(events.Tick())
    assert world.num_asked == num_asked + 1
    assert world.machine.wake_at_s is not None
    assert world.machine.wake_at_s > again_s


def test_who_was_placed_once_is_never_refused_for_that() -> None:
    oracle = Oracle(None)
    world = begun(oracle, is_full=False)
    assert world.leases
    oracle.says, num_asked = LOST, len(oracle.asked)
    lease = next(iter(world.leases))
    world.is_full = True
    error: DiptychError = DeadlineUnreachableError("full", retry_after_s=None)
    world.leases.clear()
    world.on(events.LeaseEnded(lease, error))
    world.now += 1.0
    world.on(events.Offered(room_made=True))
    assert world.outcome is None
    assert len(oracle.asked) == num_asked


@pytest.mark.parametrize(
    ("front", "resumed"), [(True, ()), (False, (1, 2))], ids=["another choice", "goes on"]
)
def test_nor_is_another_choice_or_what_goes_on_after_an_earlier_call(
    front: bool, resumed: tuple[int, ...]
) -> None:
    oracle = Oracle(LOST)
    assert begun(oracle, front=front, resumed=resumed).queued
    assert not oracle.asked


def test_where_nothing_is_refused_nobody_is_judged() -> None:
    world = begun(None)
    assert world.queued
    assert world.machine.wake_at_s is not None
    assert world.machine.wake_at_s > DUE_S


def test_a_first_placement_says_that_it_may_be_refused() -> None:
    oracle = Oracle(None)
    begun(oracle)
    assert oracle.asked[0][0].may_refuse

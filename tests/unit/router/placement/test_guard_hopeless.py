"""Requests that were refused, and that nobody could have kept, are no reason to doubt."""

from itertools import count

import pytest

from router.placement.guard import Guard, Regime
from router.placement.query import NO_OBJECTIVES, EndedRequest, Objectives
from tests.unit.router.placement.test_guard import GOALS, RATES, World, seen

HOPELESS = Objectives(1e-6, None)
HOPELESS_PACE = Objectives(None, 1e-6)


def refused(at_s: float, objectives: Objectives, num_tokens: int = 200) -> EndedRequest:
    return EndedRequest(at_s, at_s, num_tokens, objectives)


def regimes(objectives: Objectives, for_s: int = 900, num_tokens: int = 200) -> set[Regime]:
    """All that were taken while one client's requests came, all of them refused."""
    guard, taken = Guard(), set[Regime]()
    for now_s in range(1, for_s):
        guard.ended(refused(float(now_s), objectives, num_tokens))
        if guard.is_due:
            guard.look(RATES)
        taken.add(guard.regime)
    return taken


@pytest.mark.parametrize("objectives", [HOPELESS, HOPELESS_PACE])
def test_hopeless_requests_that_are_all_refused_change_nothing(objectives: Objectives) -> None:
    assert regimes(objectives) == {Regime.FREE}


@pytest.mark.parametrize("objectives", [GOALS, GOALS._replace(tpot_s=0.02), NO_OBJECTIVES])
def test_where_all_are_refused_that_could_perhaps_be_kept_others_are_tried(
    objectives: Objectives,
) -> None:
    """What workers measured may be some times too slow, as of steps with many sequences."""
    assert regimes(objectives) > {Regime.FREE}


def test_hopeless_requests_do_not_hide_what_becomes_of_others() -> None:
    """All that could be kept is missed, in the free regime alone."""
    world = World()

    def beside(regime: Regime) -> bool:
        world.guard.ended(refused(world.now_s, HOPELESS))
        return regime is not Regime.FREE

    world.run(60.0, beside)
    ((_, regime),) = world.turns
    assert regime is Regime.APART


def test_hopeless_requests_are_not_taken_for_what_too_dark_a_forecast_costs() -> None:
    """More was foretold to be missed than was; all that could be kept were placed and kept."""
    world = World()

    def beside(regime: Regime) -> bool:
        for _ in range(3):
            world.guard.ended(refused(world.now_s, HOPELESS))
        world.guard.foretold(0.6, 0.6)
        return True

    world.run(600.0, beside)
    assert world.turns == []


def test_hopeless_requests_that_were_answered_count() -> None:
    """They were not refused, so that what was foretold of them can be compared."""
    guard, number, taken = Guard(), count(1), set[Regime]()
    for now_s in (0.25 * each for each in number):
        if now_s > 60.0:
            break
        guard.ended(seen(now_s, is_kept=False)._replace(objectives=HOPELESS))
        if guard.is_due:
            guard.look(RATES)
        taken.add(guard.regime)
    assert taken > {Regime.FREE}

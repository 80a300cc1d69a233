"""How soon a fixed regime is left that keeps less than it did, or of which too little is known."""

import random
from collections.abc import Callable
from itertools import count, pairwise

import pytest

from router.placement.guard import LOOK_S, STAY_S, TRIAL_S, Regime
from tests.unit.router.placement.test_guard import World

RECOVERY_S = 20.0
WINDOW_S = 120.0


class Traffic(World):
    """Requests that come as often as it is said."""

    def regime(self) -> Regime:
        return self.guard.regime

    def trickle(self, gap_s: float, for_s: float, is_kept: Callable[[Regime], bool]) -> None:
        until_s = self.now_s + for_s
        while self.now_s < until_s:
            self.now_s += gap_s - 0.25
            self.run(0.25, is_kept)

    def until_turned(self, most_s: float, is_kept: Callable[[Regime], bool]) -> float:
        """How long it took."""
        began_s, num_turns = self.now_s, len(self.turns)
        while len(self.turns) == num_turns:
            assert self.now_s - began_s < most_s
            self.run(0.25, is_kept)
        return self.now_s - began_s


def only_fixed(regime: Regime) -> bool:
    return regime is not Regime.FREE


def only_free(regime: Regime) -> bool:
    return regime is Regime.FREE


def on_trial(*, is_free: bool = False) -> Traffic:
    world = Traffic()
    world.until_turned(60.0, only_fixed)
    if is_free:
        world.until_turned(STAY_S + LOOK_S, only_fixed)
    return world


@pytest.mark.parametrize("gap_s", [8.0, 9.0, 50.0])
def test_a_trial_ends_where_too_few_come_to_judge_it(gap_s: float) -> None:
    world = on_trial()
    began_s = world.now_s
    world.trickle(gap_s, 3600.0, lambda regime: False)
    (turned_s, regime), *others = world.turns[1:]
    assert regime is Regime.FREE
    assert turned_s - began_s <= WINDOW_S + gap_s
    assert others == []


def test_a_trial_that_was_not_judged_is_as_seldom_repeated_as_one_that_was_lost() -> None:
    world = Traffic()
    for _ in range(6):
        world.until_turned(1000.0, lambda regime: False)
        assert world.regime() is not Regime.FREE
        world.trickle(9.0, WINDOW_S, lambda regime: False)
        assert world.regime() is Regime.FREE
    fixed = [at for at, regime in world.turns if regime is not Regime.FREE]
    gaps = [after - at for at, after in pairwise(fixed)]
    assert gaps == sorted(gaps)
    assert gaps[-1] >= 480.0


def test_a_fixed_regime_that_is_better_each_time_stays_eight_minutes_at_the_most() -> None:
    world = Traffic()
    world.run(1800.0, only_fixed)
    stays = [
        after_s - at_s
        for (at_s, regime), (after_s, _) in pairwise(world.turns)
        if regime is not Regime.FREE
    ]
    assert stays[:5] == pytest.approx([60.0, 120.0, 240.0, 480.0, 480.0], abs=LOOK_S)


def test_a_trial_of_the_forecast_that_cannot_be_judged_ends_too() -> None:
    """Then what comes otherwise than foretold is doubted as ever."""
    world = on_trial(is_free=True)
    world.trickle(9.0, WINDOW_S + 20.0, only_fixed)
    assert world.regime() is Regime.FREE
    assert world.until_turned(60.0, only_fixed) <= 30.0, "nothing is barred"
    world.run(TRIAL_S + 2 * LOOK_S, only_fixed)
    assert world.regime() is Regime.APART, "it was no trial of the forecast that was lost"
    assert world.until_turned(STAY_S, only_fixed) > TRIAL_S, "and no longer stay"


def test_a_trial_in_a_burst_is_judged_by_it_after_a_pause() -> None:
    world = on_trial()
    world.run(TRIAL_S / 2, only_fixed)
    world.now_s += 3 * WINDOW_S
    world.run(1.0, lambda regime: False)
    assert world.regime() is Regime.APART, "it was won"
    world.run(LOOK_S, lambda regime: False)
    assert world.regime() is Regime.FREE, "the minute in which it stays is over"


@pytest.mark.parametrize("stayed_s", [25.0, 50.0, 300.0, 450.0])
@pytest.mark.parametrize("is_kept_before", [0.5, 0.9, 1.0])
def test_a_fixed_regime_is_left_soon_where_it_keeps_nothing_any_more(
    stayed_s: float, is_kept_before: float
) -> None:
    world, rng = Traffic(), random.Random(5)
    chances = {Regime.FREE: 0.1}

    def kept(regime: Regime) -> bool:
        return rng.random() < chances.get(regime, is_kept_before)

    while world.guard._stay_s <= stayed_s + LOOK_S or world.regime() is Regime.FREE:
        world.run(1.0, kept)
    while world.now_s - world.guard._since_s < stayed_s:
        world.run(0.25, kept)
    regime = world.regime()
    assert regime is not Regime.FREE
    assert world.until_turned(RECOVERY_S, only_free) <= RECOVERY_S
    num_turns = len(world.turns)
    world.run(600.0, only_free)
    assert len(world.turns) == num_turns, "it is no longer doubted"


def test_what_the_forecast_has_to_beat_is_what_the_fixed_regime_keeps_by_then() -> None:
    """After the mix has changed it keeps six of ten; the fixed regime kept all before."""
    world, turn = on_trial(), count()
    world.run(30.0, only_fixed)
    world.until_turned(RECOVERY_S, only_free)
    world.run(TRIAL_S + 2 * LOOK_S, lambda regime: next(turn) % 10 < 6)
    assert world.regime() is Regime.FREE
    assert world.guard._stay_s == STAY_S


def test_where_the_forecast_is_worse_still_the_fixed_regime_comes_back_and_is_left_alone() -> None:
    """All keep less than they did: it is not asked again before the stay is over."""
    world, turn = on_trial(), count()
    world.run(30.0, only_fixed)

    def third(regime: Regime) -> bool:
        return regime is not Regime.FREE and next(turn) % 3 == 0

    world.until_turned(RECOVERY_S, third)
    world.until_turned(TRIAL_S + LOOK_S, third)
    assert world.regime() is Regime.APART
    assert world.until_turned(1000.0, third) >= 2 * STAY_S, "its stay is doubled as ever"


def test_a_burst_alone_is_no_reason_to_leave_a_fixed_regime() -> None:
    """Ten seconds of which half is missed, in each half minute."""
    world, turn = on_trial(), count()
    world.run(TRIAL_S + LOOK_S, only_fixed)
    world.guard._stay_s = 480.0
    num_turns = len(world.turns)

    def bursts(regime: Regime) -> bool:
        return regime is not Regime.FREE and (world.now_s % 30.0 < 20.0 or next(turn) % 2 == 0)

    world.run(300.0, bursts)
    assert len(world.turns) == num_turns


@pytest.mark.parametrize(("gap_s", "most"), [(0.25, 0.07), (1.0, 0.1)])
@pytest.mark.parametrize(("fixed", "free"), [(0.9, 0.5), (0.5, 0.2), (0.3, 0.1)])
def test_by_chance_a_fixed_regime_is_hardly_left_sooner(
    fixed: float, free: float, gap_s: float, most: float
) -> None:
    """Where it never is, the forecast is on trial for 0.044 of two hours, with 0.9 and 0.5."""
    world, rng = Traffic(), random.Random(4)
    chances = {Regime.FREE: free}
    world.trickle(gap_s, 2 * 3600.0, lambda regime: rng.random() < chances.get(regime, fixed))
    tried_s = sum(
        after - at for (at, regime), (after, _) in pairwise(world.turns) if regime is Regime.FREE
    )
    assert tried_s <= most * 2 * 3600.0


def test_of_few_requests_nothing_is_said_in_a_stay_either() -> None:
    world = on_trial()
    world.run(TRIAL_S + LOOK_S, only_fixed)
    world.now_s += WINDOW_S - LOOK_S
    world.guard._stay_s = 480.0
    world.trickle(9.0, 180.0, only_free)
    assert world.regime() is Regime.APART

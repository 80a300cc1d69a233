"""What work costs is learned from how long it took, and how often it takes longer."""

import math
from collections.abc import Callable
from random import Random
from statistics import median

import pytest

from diptych.learned_cost import LearnedCost, MachinePace

LAW = (0.04, 0.0015, 4e-6)  # s: for itself, for a row, for a token of context


def features(rng: Random) -> tuple[float, float, float]:
    num_rows = rng.randrange(1, 17)
    return (1.0, float(num_rows), float(sum(rng.randrange(50, 1500) for _ in range(num_rows))))


def cost_of(work: tuple[float, ...], law: tuple[float, ...] = LAW) -> float:
    return math.fsum(c * x for c, x in zip(law, work, strict=True))


def teach(
    learned: LearnedCost, noise: Callable[[], float], num: int, law: tuple[float, ...] = LAW
) -> None:
    rng = Random(num)
    for _ in range(num):
        work = features(rng)
        learned.learn(work, cost_of(work, law) * noise())


def test_a_law_without_noise_is_found() -> None:
    learned = LearnedCost(3)
    teach(learned, lambda: 1.0, 300)
    assert learned.learned.coefficients == pytest.approx(LAW, rel=0.01)
    assert learned.learned.num_samples == 300


@pytest.mark.parametrize("spread", [0.03, 0.1, 0.2])
def test_the_error_is_small_and_nine_of_ten_are_below_the_upper_ratio(spread: float) -> None:
    """One in a hundred takes five times as long: the machine had something else to do."""
    learned, rng = LearnedCost(3), Random(7)
    errors, num_covered = [], 0
    for number in range(3000):
        work = features(rng)
        law_s = cost_of(work)
        measured_s = law_s * rng.lognormvariate(0, spread) * (5 if rng.random() < 0.01 else 1)
        expected_s = learned.expected_s(work)
        if number >= 1000:
            errors.append(abs(expected_s - law_s) / law_s)
            num_covered += measured_s <= expected_s * learned.learned.upper_ratio
        learned.learn(work, measured_s)
    assert sorted(errors)[len(errors) // 2] < 0.05
    assert 0.88 < num_covered / len(errors) < 0.92


def joined(machine: MachinePace) -> LearnedCost:
    learned = LearnedCost(3)
    learned.join(machine)
    return learned


@pytest.mark.parametrize("seed", range(4))
def test_what_slows_one_kind_of_work_is_expected_of_the_other(seed: int) -> None:
    """Three of four measurements are of one kind, and a neighbour comes and goes within ten."""
    rng, machine = Random(seed), MachinePace()
    together = joined(machine), joined(machine)
    apart = LearnedCost(3), LearnedCost(3)
    log_pace, errors = 0.0, {together: list[float](), apart: list[float]()}
    for number in range(1500):
        log_pace = 0.9 * log_pace + rng.gauss(0.0, 0.06)
        is_rare, work = rng.random() < 0.25, features(rng)
        measured_s = cost_of(work) * (4 if is_rare else 1) * math.exp(log_pace)
        for costs, found in errors.items():
            learned = costs[is_rare]
            if number >= 200 and is_rare:
                found.append(abs(learned.expected_s(work) / measured_s - 1.0))
            learned.learn(work, measured_s)
    assert median(errors[together]) < 0.75 * median(errors[apart])


@pytest.mark.parametrize("spread", [0.02, 0.1])
def test_what_differs_by_chance_is_not_followed(spread: float) -> None:
    """Two kinds on one machine that differ each by itself: hardly more than if they were apart."""
    machine = MachinePace()
    together, apart = (joined(machine), joined(machine)), (LearnedCost(3), LearnedCost(3))
    rng, errors = Random(5), (list[float](), list[float]())
    for number in range(6000):
        is_rare, work = rng.random() < 0.25, features(rng)
        law_s = cost_of(work)
        measured_s = law_s * rng.lognormvariate(0.0, spread)
        for costs, found in zip((together, apart), errors, strict=True):
            learned = costs[is_rare]
            if number >= 500:
                found.append(abs(learned.expected_s(work) / law_s - 1.0))
            learned.learn(work, measured_s)
    assert median(errors[0]) < 1.1 * median(errors[1])


@pytest.mark.parametrize("slow", [1.6, 0.6])
def test_what_one_kind_has_by_chance_is_not_taken_for_the_other_ones_pace(slow: float) -> None:
    """One in ten takes much longer, or less, for as long as nothing of the other kind comes."""
    rng, machine = Random(3), MachinePace()
    busy, idle = joined(machine), joined(machine)
    work = (1.0, 4.0, 2000.0)
    for _ in range(200):
        for learned in (busy, idle):
            learned.learn(work, cost_of(work))
    ratios = []
    for _ in range(30_000):
        noise = rng.lognormvariate(0.0, 0.02) * (slow if rng.random() < 0.1 else 1.0)
        busy.learn(work, cost_of(work) * noise)
        ratios.append(idle.expected_s(work) / cost_of(work))
    assert median(ratios[-3000:]) == pytest.approx(1.0, abs=0.05)
    assert 0.7 < min(ratios) < max(ratios) < 1.4


def test_what_is_new_while_the_machine_is_slow_is_not_slowed_twice() -> None:
    machine = MachinePace()
    known, new = joined(machine), joined(machine)
    teach(known, lambda: 1.0, 200)
    teach(known, lambda: 2.0, 30)
    work = (1.0, 4.0, 2000.0)
    before_s = known.expected_s(work)
    for number in range(30):
        new.learn(work, 2.0 * cost_of(work))
        if number >= 8:
            assert new.expected_s(work) == pytest.approx(2.0 * cost_of(work), rel=0.1)
    assert known.expected_s(work) == pytest.approx(before_s, rel=0.03)


@pytest.mark.parametrize("spread", [0.03, 0.1, 0.2])
def test_soon_no_more_than_needed_is_left_for_what_takes_longer(spread: float) -> None:
    """Where steps are rare, the first hundreds are minutes: of thirty that start anew, together."""
    num_covered = num_all = 0
    for seed in range(30):
        learned, rng = LearnedCost(3), Random(seed)
        for number in range(300):
            work = features(rng)
            measured_s = cost_of(work) * rng.lognormvariate(0, spread)
            if number >= 24:
                upper_s = learned.expected_s(work) * learned.learned.upper_ratio
                num_covered += measured_s <= upper_s
                num_all += 1
            learned.learn(work, measured_s)
    assert 0.88 < num_covered / num_all < 0.92


def test_a_machine_that_became_slower_is_learned_anew() -> None:
    learned = LearnedCost(3)
    teach(learned, lambda: 1.0, 1000)
    slower = tuple(3 * value for value in LAW)
    teach(learned, lambda: 1.0, 4000, slower)
    work = features(Random(1))
    assert learned.expected_s(work) == pytest.approx(cost_of(work, slower), rel=0.1)


def test_the_pace_follows_a_neighbour_that_comes_and_goes() -> None:
    """Every 200 measurements all work takes twice as long, or as before."""
    learned, rng = LearnedCost(3), Random(5)
    errors = []
    for number in range(4000):
        work = features(rng)
        taken_s = cost_of(work) * (2.0 if number // 200 % 2 else 1.0)
        if number >= 1000:
            errors.append(abs(learned.expected_s(work) - taken_s) / taken_s)
        learned.learn(work, taken_s)
    assert sorted(errors)[len(errors) // 2] < 0.05


def test_what_is_doubted_is_not_believed_where_some_are_faster() -> None:
    """All was slowed while it was first measured, as others started beside it."""
    learned, rng = LearnedCost(3), Random(9)
    teach(learned, lambda: 2.0, 40)
    learned.doubt()
    ratios = []
    for _ in range(60):
        work = features(rng)
        ratios.append(learned.expected_s(work) / cost_of(work))
        learned.learn(work, cost_of(work))
    assert ratios[0] == pytest.approx(2.0, rel=0.02)
    assert all(0.93 < ratio < 1.2 for ratio in ratios[4:])


@pytest.mark.parametrize(
    ("num_as_before", "times"), [(0, 1.7), (8, 0.5)], ids=["slower", "later, and faster"]
)
def test_nothing_else_is_taken_otherwise_for_a_doubt(num_as_before: int, times: float) -> None:
    doubted, trusted = LearnedCost(3), LearnedCost(3)
    for learned in (doubted, trusted):
        teach(learned, lambda: 1.0, 40)
        if learned is doubted:
            learned.doubt()
        teach(learned, lambda: 1.0, num_as_before)
        teach(learned, lambda: times, 3)
    assert doubted.learned == trusted.learned


def test_no_coefficient_is_negative() -> None:
    """Longer contexts that took less time: their part of the cost is nothing."""
    learned, rng = LearnedCost(2), Random(3)
    for _ in range(200):
        size = rng.uniform(1, 100)
        learned.learn((1.0, size), 2.0 - 0.01 * size)
    assert learned.learned.coefficients[1] == 0.0
    assert learned.learned.coefficients[0] == pytest.approx(1.5, rel=0.1)


def test_what_was_never_seen_costs_nothing_and_what_was_alike_is_shared() -> None:
    learned = LearnedCost(3)
    for _ in range(50):
        learned.learn((1.0, 100.0, 0.0), 0.5)
    fixed, each, unseen = learned.learned.coefficients
    assert fixed == pytest.approx(0.25, rel=0.01)
    assert each == pytest.approx(0.0025, rel=0.01)
    assert unseen == 0.0


def test_nothing_is_learned_of_no_time() -> None:
    learned = LearnedCost(1)
    learned.learn((1.0,), 0.0)
    assert learned.learned.coefficients == (0.0,)
    assert learned.learned.num_samples == 0
    assert learned.expected_s((1.0,)) == 0.0

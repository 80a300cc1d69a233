"""The arithmetic of goodput."""

import pytest

from diptych.simulation.outcome import Objective, Outcome, goodput, medians
from diptych.simulation.workload import Shape
from tests.bench.slo import Lengths, best, scaled


def test_an_outcome_counts_from_when_the_request_was_due() -> None:
    outcome = Outcome.of(10.0, [10.5, 10.6, 10.9], num_wanted=3)
    assert outcome.ttft_s == pytest.approx(0.5)
    assert outcome.tpot_s == pytest.approx(0.2)


def test_an_unfinished_request_is_a_miss() -> None:
    outcome = Outcome.of(10.0, [10.5, 10.6], num_wanted=3)
    assert outcome == Outcome(None, None)
    assert not Objective(100.0, 100.0).met_by(outcome)


def test_goodput_counts_only_what_meets_both_objectives() -> None:
    outcomes = [
        Outcome(1.0, 0.1),
        Outcome(1.0, 0.3),  # too slow a token
        Outcome(3.0, 0.1),  # too late a first one
        Outcome(None, None),
    ]
    assert goodput(outcomes, Objective(2.0, 0.2), duration_s=10.0) == pytest.approx(0.1)


def test_the_best_setting_is_the_largest() -> None:
    assert best({"64": 0.4, "512": 0.9, "1024": 0.2}) == ("512", 0.9)


def test_medians_leave_out_what_did_not_finish() -> None:
    outcomes = [Outcome(1.0, 0.1), Outcome(2.0, 0.3), Outcome(3.0, 0.2), Outcome(None, None)]
    assert medians(outcomes) == Objective(2.0, 0.2)


def test_lengths_are_divided_and_clipped() -> None:
    shapes = [Shape(0.0, 374, 44), Shape(1.0, 8000, 4000), Shape(2.0, 1, 1)]
    assert scaled(shapes, divisor=4, max_prompt=1024, max_output=256) == [
        Lengths(94, 11),
        Lengths(1024, 256),
        Lengths(1, 2),
    ]

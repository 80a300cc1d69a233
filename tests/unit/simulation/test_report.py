"""What runs showed is told of each."""

from diptych.simulation.cluster import Split
from diptych.simulation.gaps import Gaps
from diptych.simulation.outcome import Objective, Outcome
from diptych.simulation.report import Case, Measured, series
from diptych.simulation.simulation import Run


def test_each_rate_has_a_line_of_its_own_in_the_picture() -> None:
    """Also where they are close."""
    run = Run([1.0], [Outcome(0.1, 0.01, 2)], {}, Gaps(), {}, 1, 1)
    rates = (0.02, 0.04, 4.51, 4.54, 1.0 / 3.0)
    cases = [Case(Split(0, 2), "predicted", rate, run) for rate in rates]
    drawn = series(Measured(Objective(0.1, 0.01), Objective(1.0, 0.1), 10.0, cases))
    assert list(drawn) == [
        f"decode=2 predicted at {rate}/s" for rate in ("0.02", "0.04", "4.51", "4.54", "0.333333")
    ]

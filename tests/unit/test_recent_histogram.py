"""What a histogram says of the last moments."""

import pytest
from prometheus_client import CollectorRegistry

from diptych.telemetry.metrics import Metrics
from diptych.telemetry.recent import RecentHistogram


def test_what_is_older_than_the_window_does_not_count() -> None:
    histogram = Metrics(CollectorRegistry()).loop_histogram("h_seconds", "H.", (1.0, 2.0, 4.0))
    recent = RecentHistogram(histogram, num_intervals=2)
    assert recent.distribution() == (0, None, None)
    histogram.observe(0.5, 10)
    assert recent.distribution() == (10, 0.5, 0.95), "evenly in the bucket from 0 to 1"
    recent.remember()
    histogram.observe(3.0, 4)
    recent.remember()
    assert recent.distribution() == (4, 3.0, 3.9)
    histogram.observe(3.0)
    recent.remember()
    assert recent.distribution().num_samples == 1, "the oldest was forgotten"
    assert recent.num_samples == 15


def test_what_lies_above_the_last_bound_is_told_as_that() -> None:
    histogram = Metrics(CollectorRegistry()).loop_histogram("h_seconds", "H.", (1.0, 2.0))
    histogram.observe(100.0)
    assert RecentHistogram(histogram, 1).distribution() == (1, 2.0, 2.0)


def test_all_label_values_count_together() -> None:
    family = Metrics(CollectorRegistry()).labelled_histogram("h_seconds", "H.", ["kind"], (1.0,))
    family.labels("a").observe(0.1)
    family.labels("b").observe(0.1)
    recent = RecentHistogram(family, 1)
    assert recent.distribution().num_samples == 2
    assert recent.distribution().p50 == pytest.approx(0.5)

"""The histogram without locks says what the library's own does."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.registry import Collector

from diptych.telemetry.metrics import LoopHistogram

BOUNDS = (0.01, 0.1, 1.0)


def samples(collector: Collector) -> Mapping[tuple[str, str], float]:
    """By name and bound; without when it was made."""
    return {
        (sample.name, sample.labels.get("le", "")): sample.value
        for family in collector.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_it_counts_as_the_librarys() -> None:
    ours = LoopHistogram("gap", "Gaps.", BOUNDS)
    theirs = Histogram("gap", "Gaps.", buckets=BOUNDS, registry=CollectorRegistry())
    for value in (0.0, 0.01, 0.02, 0.1, 5.0):
        ours.observe(value)
        theirs.observe(value)
    assert samples(ours) == samples(theirs)


def test_what_comes_together_has_no_gaps_between() -> None:
    """Of three tokens one has the gap before them."""
    together, singly = (LoopHistogram("gap", "Gaps.", BOUNDS) for _ in range(2))
    together.observe_together(3, 0.5)
    together.observe_together(1, 0.02)
    for value in (0.5, 0.0, 0.0, 0.02):
        singly.observe(value)
    assert samples(together) == samples(singly)

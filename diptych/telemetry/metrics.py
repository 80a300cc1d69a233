"""Prometheus metrics of one process object, in a registry of its own.

Everything here is written and read on the event-loop thread (a scrape hops onto
it, see :mod:`diptych.service_host`), so a metric may read live state. Labels are
bounded: a family over an enum is made whole at once, and an unknown value is a
bug (KeyError); labels over peers are read from live state at scrape time and so
vanish with the peer. Help texts carry the definition.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client import values as kinds_of_values
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

SECONDS_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip

Sample = tuple[Sequence[str], float]

# With PROMETHEUS_MULTIPROC_DIR, which somebody else's workers need, values would be kept in files
# there, and those of an earlier process with our id be taken for ours.
kinds_of_values.ValueClass = kinds_of_values.MutexValue


class Metrics:
    """Factory of one process object's metrics; names get the prefix ``diptych_``.

    Units come last in the name (``_seconds``, ``_bytes``, ``_tokens``);
    counters end in ``_total``.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

    def counter(self, name: str, definition: str) -> Counter:
        """A count that only grows."""
        return Counter(_full(name), definition, registry=self.registry)

    def gauges(self, name: str, definition: str, labels: Sequence[str]) -> Gauge:
        """A family of gauges; the caller keeps the label values bounded."""
        return Gauge(_full(name), definition, labels, registry=self.registry)

    def histogram(
        self, name: str, definition: str, buckets: Sequence[float] = SECONDS_BUCKETS
    ) -> Histogram:
        """A distribution."""
        return Histogram(_full(name), definition, buckets=buckets, registry=self.registry)

    def loop_histogram(
        self, name: str, definition: str, buckets: Sequence[float] = SECONDS_BUCKETS
    ) -> "LoopHistogram":
        """A distribution of what happens very often; see :class:`LoopHistogram`."""
        histogram = LoopHistogram(_full(name), definition, buckets)
        self.registry.register(histogram)
        return histogram

    def labelled_histogram(
        self,
        name: str,
        definition: str,
        labels: Sequence[str],
        buckets: Sequence[float] = SECONDS_BUCKETS,
    ) -> Histogram:
        """A family of distributions; the caller keeps the label values bounded."""
        return Histogram(_full(name), definition, labels, buckets=buckets, registry=self.registry)

    def counters(
        self, name: str, definition: str, label: str, values: Iterable[str]
    ) -> Mapping[str, Counter]:
        """One counter per value of ``label``; all exist from the start, at 0."""
        family = Counter(_full(name), definition, [label], registry=self.registry)
        return {str(value): family.labels(str(value)) for value in values}

    def labelled_counter(self, name: str, definition: str, labels: Sequence[str]) -> Counter:
        """A family of counts; the caller keeps the label values bounded."""
        return Counter(_full(name), definition, labels, registry=self.registry)

    def histograms(
        self, name: str, definition: str, label: str, values: Iterable[str]
    ) -> Mapping[str, Histogram]:
        """One histogram of seconds per value of ``label``."""
        family = Histogram(
            _full(name), definition, [label], buckets=SECONDS_BUCKETS, registry=self.registry
        )
        return {str(value): family.labels(str(value)) for value in values}

    def read_gauge(self, name: str, definition: str, read: Callable[[], float]) -> None:
        """A gauge read from live state at each scrape."""
        self.read_gauges(name, definition, (), lambda: [((), read())])

    def read_gauges(
        self,
        name: str,
        definition: str,
        labels: Sequence[str],
        read: Callable[[], Iterable[Sample]],
    ) -> None:
        """Gauges read at each scrape: ``read`` gives (label values, value) pairs."""
        self.registry.register(_Read(_full(name), definition, labels, read))


class LoopHistogram(Collector):
    """A histogram without locks, for what happens with every token.

    It says the same as the library's own, which takes two locks per observation and costs
    ten times as much. Observed and collected on one thread only: the event loop's.
    """

    def __init__(self, name: str, definition: str, buckets: Sequence[float]) -> None:
        """``buckets`` are upper bounds, ascending; one without a bound follows them."""
        self._name, self._definition = name, definition
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._created_s = time.time()

    def observe(self, value: float, num_times: int = 1) -> None:
        """Count ``value``, so many times at once."""
        self._counts[bisect_left(self._bounds, value)] += num_times
        self._sum += value * num_times

    def observe_together(self, num: int, gap_s: float) -> None:
        """Of so many that came ``gap_s`` after the one before, with no gaps between them."""
        self._counts[bisect_left(self._bounds, gap_s)] += 1
        self._sum += gap_s
        if num > 1:
            self.observe(0.0, num - 1)

    def describe(self) -> Iterator[Metric]:
        """See the library's Collector."""
        yield HistogramMetricFamily(self._name, self._definition)

    def collect(self) -> Iterator[Metric]:
        """See the library's Collector."""
        family = HistogramMetricFamily(self._name, self._definition)
        bounds = map(floatToGoString, (*self._bounds, float("inf")))
        counts = map(float, accumulate(self._counts))
        family.add_metric([], list(zip(bounds, counts, strict=True)), self._sum)
        family.add_sample(f"{self._name}_created", {}, self._created_s)
        yield family


class _Read(Collector):
    def __init__(
        self,
        name: str,
        definition: str,
        labels: Sequence[str],
        read: Callable[[], Iterable[Sample]],
    ) -> None:
        self._name, self._definition, self._labels, self._read = name, definition, labels, read

    def describe(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(self._name, self._definition, labels=self._labels)

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(self._name, self._definition, labels=self._labels)
        for values, value in self._read():
            family.add_metric(list(values), value)
        yield family


def _full(name: str) -> str:
    return name if name.startswith(("gen_ai_", "process_")) else f"diptych_{name}"

"""What clients are told of the cluster: made once for all who look within an interval."""

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from prometheus_client.registry import Collector

from diptych.errors import NotServedError
from diptych.telemetry.recent import RecentDistribution, RecentHistogram
from router.cluster.overview import Overview
from router.generation.cluster_report import ClusterReport, LatencyReport

INTERVAL_S: Final = 0.5  # a report is at most so old
_REMEMBER_S: Final = 5.0
_NUM_REMEMBERED: Final = 6  # half a minute


class Queue(Protocol):
    """The requests of this router."""

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_placed(self) -> int: ...


class ClusterView:
    """Owns the last report. Event loop only.

    Tells sums over all requests and nothing of any one: no tenant, no id, no text. Even
    sums tell one tenant of another's load, so ``is_told`` says whether there is a view.
    """

    def __init__(
        self,
        model: str,
        overview: Callable[[], Overview],
        queue: Queue,
        clock: Callable[[], float],
        *,
        ttft: Collector,
        itl: Collector,
        is_told: bool,
    ) -> None:
        """``ttft`` and ``itl`` are the router's histograms of all requests."""
        self._model = model
        self._overview = overview
        self._queue = queue
        self._ttft = RecentHistogram(ttft, _NUM_REMEMBERED)
        self._itl = RecentHistogram(itl, _NUM_REMEMBERED)
        self._clock = clock
        self._is_told = is_told
        self._report: ClusterReport | None = None
        self._made_s = 0.0

    async def run(self) -> None:
        """Remember what latencies were, until cancelled."""
        while self._is_told:
            self.remember()
            await asyncio.sleep(_REMEMBER_S)

    def remember(self) -> None:
        """Another few seconds are over."""
        self._ttft.remember()
        self._itl.remember()

    def report(self) -> ClusterReport:
        """At most ``INTERVAL_S`` old; the same object for all who ask meanwhile.

        Raises NotServedError: this router does not tell.
        """
        if not self._is_told:
            raise NotServedError(
                "this router does not tell how its cluster is: --cluster-view of its settings"
            )
        now_s = self._clock()
        if self._report is None or now_s - self._made_s >= INTERVAL_S:
            self._report, self._made_s = self._make(), now_s
        return self._report

    def _make(self) -> ClusterReport:
        seen = self._overview()
        return ClusterReport(
            model=self._model,
            num_waiting=self._queue.num_waiting,
            num_placed=self._queue.num_placed,
            num_output_tokens=self._ttft.num_samples + self._itl.num_samples,
            ttft=_latency(self._ttft.distribution()),
            itl=_latency(self._itl.distribution()),
            num_prefill=seen.num_prefill,
            num_decode=seen.num_decode,
            num_pairs=seen.num_pairs,
            prefill=seen.prefill,
            decode=seen.decode,
            pairs=seen.pairs,
        )


def _latency(recent: RecentDistribution) -> LatencyReport:
    return LatencyReport(num_samples=recent.num_samples, p50_s=recent.p50, p95_s=recent.p95)

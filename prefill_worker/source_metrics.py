"""What this worker served to readers, as metrics read at each scrape."""

from diptych.telemetry.metrics import Metrics
from kvtransfer.source.fetch_session import SourceCounters
from kvtransfer.source.lease_table import LeaseTable


def register(metrics: Metrics, counters: SourceCounters, leases: LeaseTable) -> None:
    """Make them; ``counters`` and ``leases`` are live."""
    metrics.read_gauge(
        "kv_tickets_valid", "Tickets with which a reader may fetch.", lambda: leases.num_grants
    )
    metrics.read_gauge(
        "kv_fetches_open", "Pulls and probes under way.", lambda: counters.num_fetches_open
    )
    metrics.read_gauge(
        "kv_fetches_confirmed",
        "Pulls and probes confirmed since start.",
        lambda: counters.num_confirmed,
    )
    metrics.read_gauges(
        "kv_fetches_refused",
        "Connections, pulls and probes since start that ended with an error, by its reason.",
        ("reason",),
        lambda: [((reason,), float(num)) for reason, num in counters.num_refused.items()],
    )
    metrics.read_gauge(
        "kv_digest_seconds",
        "Time since start spent on digests of announced blocks, s.",
        lambda: counters.digest_s,
    )

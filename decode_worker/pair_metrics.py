"""Pairs and what their transfers went through, as metrics read at each scrape."""

from collections.abc import Iterable

from diptych.telemetry.metrics import Metrics, Sample
from diptych.v1 import worker_pb2
from diptych.wire_names import PAIR_STATE_NAMES
from kvtransfer.reader.pairs import PairTable


def register(metrics: Metrics, pairs: PairTable) -> None:
    """Make them. A pair's series vanish with the pair."""

    def rates() -> Iterable[Sample]:
        return [
            ((pair.source_address, pair.transport), pair.bytes_per_s)
            for pair in pairs.pairs()
            if pair.state == worker_pb2.PAIR_STATE_PROVEN
        ]

    def ways() -> Iterable[Sample]:
        return [
            ((pair.source_address, pair.way), 1.0)
            for pair in pairs.pairs()
            if pair.state == worker_pb2.PAIR_STATE_PROVEN
        ]

    def states() -> Iterable[Sample]:
        count = dict.fromkeys(PAIR_STATE_NAMES, 0)
        for pair in pairs.pairs():
            count[pair.state] += 1
        return [((name,), float(count[state])) for state, name in PAIR_STATE_NAMES.items()]

    counters = pairs.counters
    metrics.read_gauges(
        "kv_pair_bytes_per_second",
        "Rate of each proven pair, by source and transport: of the probe, then a moving average "
        "of real pulls.",
        ("source", "transport"),
        rates,
    )
    metrics.read_gauges(
        "kv_pair_way",
        "1 for each proven pair, by source: the two memories, and directly, staged or in messages.",
        ("source", "way"),
        ways,
    )
    metrics.read_gauges("kv_pairs", "Prefill workers known, by state.", ("state",), states)
    metrics.read_gauges(
        "kv_pairs_failed",
        "Times since start that a pair could not be proven, by the error's reason.",
        ("reason",),
        lambda: [((reason,), float(num)) for reason, num in counters.num_pairs_failed.items()],
    )
    metrics.read_gauge(
        "kv_transport_fallbacks",
        "Times since start that a pair's wanted transport failed and the next was tried.",
        lambda: counters.num_transport_fallbacks,
    )
    metrics.read_gauge(
        "kv_pull_refetches",
        "Fetches since start that began a pull anew after a transport agent ended under it.",
        lambda: counters.num_refetches,
    )
    metrics.read_gauge(
        "kv_agent_teardowns",
        "Times since start that the transport's agent was destroyed to end a read.",
        lambda: counters.num_agent_teardowns,
    )
    metrics.read_gauge(
        "kv_reads_open",
        "Reads that may still write local blocks, those of ended pulls included.",
        lambda: pairs.num_open_reads,
    )
    metrics.read_gauge(
        "kv_quarantine_age_seconds",
        "Age of the oldest read that no pull waits for, s; 0 without one.",
        lambda: pairs.oldest_quarantined_s,
    )
    metrics.read_gauge(
        "kv_quarantined_blocks_ever",
        "Blocks since start whose read was unfinished when their pull ended.",
        lambda: pairs.num_quarantined_blocks_ever,
    )

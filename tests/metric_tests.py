"""Which test moves what a short run of a cluster may leave at 0; by metric, without prefix."""

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
_LIVE: Final = "tests/unit/test_live_metrics.py"

MOVED_BY: Final = {
    "kv_agent_teardowns": _LIVE,
    "kv_block_mismatches": "tests/unit/engine/scheduling/test_audit.py",
    "kv_fetches_open": _LIVE,
    "kv_pairs_failed": _LIVE,
    "kv_pull_refetches": _LIVE,
    "kv_quarantine_age_seconds": _LIVE,
    "kv_quarantined_blocks_ever": _LIVE,
    "kv_reads_open": _LIVE,
    "kv_tickets_valid": _LIVE,
    "kv_transport_fallbacks": _LIVE,
    "kv_unproven": "tests/chaos/test_handoff_faults.py",
    "leases_open": _LIVE,
    "log_lines_dropped": _LIVE,
    "preemptions": _LIVE,
    "router_discovery_age_seconds": "tests/unit/router/test_telemetry.py",
    "router_requests_placed": _LIVE,
    "router_requests_waiting": _LIVE,
    "sequences_running": _LIVE,
    "sequences_waiting": _LIVE,
    "trace_spans_forgotten": _LIVE,
    "trace_spans_held": _LIVE,
}

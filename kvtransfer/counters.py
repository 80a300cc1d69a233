"""Plain counters that the workers export as metrics. Event loop only."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class ReaderCounters:
    """What a worker pulled since it started."""

    num_pulls_proven: int = 0
    num_pulls_cancelled: int = 0
    num_pulls_failed: Counter[str] = field(default_factory=Counter)  # by PullFailure name
    num_pairs_failed: Counter[str] = field(default_factory=Counter)  # by error reason
    num_refetches: int = 0  # under the same ticket, after a transport agent ended
    num_bytes: Counter[str] = field(default_factory=Counter)  # proven, by transport
    num_quarantined_blocks: int = 0  # now
    num_quarantined_blocks_total: int = 0  # ever
    num_agent_teardowns: int = 0
    num_transport_fallbacks: int = 0
    read_s: float = 0.0
    exposed_s: float = 0.0
    digest_s: float = 0.0


@dataclass(slots=True)
class SourceCounters:
    """What a worker served since it started."""

    num_fetches_open: int = 0  # now
    num_confirmed: int = 0
    num_refused: Counter[str] = field(default_factory=Counter)  # by error reason
    num_inline_bytes: int = 0
    digest_s: float = 0.0

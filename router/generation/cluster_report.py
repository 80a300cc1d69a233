"""How the cluster is at one moment, as plain data: sums over everybody, nothing of any one request.

What a client may hear of it follows :class:`router.frontend.cluster_view.ClusterView`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockReport:
    """A worker's KV blocks; each counts once, so the owners sum to ``total``."""

    total: int = 0
    free: int = 0
    cached: int = 0
    running: int = 0
    reserved: int = 0
    leased: int = 0
    quarantined: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """One worker, as it told this router last. Zeros: it does not say."""

    address: str
    state: str  # ready, starting, draining, failed, or unreachable
    message: str = ""  # what it says of that
    is_used: bool = False  # requests may be placed on it
    blocks: BlockReport = BlockReport()
    num_running: int = 0  # sequences in its batch
    num_waiting: int = 0  # and waiting for a place in it
    max_num_seqs: int = 0
    num_pending_prefill_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PairReport:
    """The way from one prefill worker to one decode worker."""

    prefill: str  # addresses
    decode: str
    state: str  # proven, connecting, or failed
    transport: str = ""
    bytes_per_s: float = 0.0
    num_pulls: int = 0  # since the pair was proven, of all routers
    way: str = ""  # which memories it connects, as the decode worker says


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyReport:
    """Of the last half minute. The quantiles are None where nothing was measured."""

    num_samples: int = 0
    p50_s: float | None = None
    p95_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterReport:
    """The pools, the ways between them, and this router's own queue.

    The lists are cut at a bound; the counts are of all there are.
    """

    model: str
    num_waiting: int  # requests in this router's queue
    num_placed: int  # and on workers
    num_output_tokens: int  # written by this router since its start; first ones at their end
    ttft: LatencyReport
    itl: LatencyReport
    num_prefill: int
    num_decode: int
    num_pairs: int
    prefill: Sequence[WorkerReport]
    decode: Sequence[WorkerReport]
    pairs: Sequence[PairReport]


def members_of(report: object) -> dict[str, object]:
    """The members of any of these, as they are: ``asdict`` copies all below, ten times slower."""
    assert is_dataclass(report)
    return {each.name: getattr(report, each.name) for each in fields(report)}

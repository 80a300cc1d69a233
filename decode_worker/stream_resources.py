"""What the streams of a loaded decode worker share."""

from dataclasses import dataclass

from decode_worker.worker_limits import SessionRules
from diptych.telemetry.families import EngineMetrics, TransferMetrics
from diptych.worker.engine_parts import EngineParts
from kvtransfer.reader.pairs import PairTable


class UnfinishedReads:
    """Local blocks that posted reads may still write; kept out of the pool until they end.

    The pair table calls it; sessions look blocks up in ``block_ids``. Event loop only.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self.block_ids: set[int] = set()

    def begin(self, block_ids: frozenset[int]) -> None:
        """A pull ended with reads into these blocks unfinished."""
        self.block_ids |= block_ids
        self._parts.pool.quarantine(block_ids)

    def end(self, block_ids: frozenset[int]) -> None:
        """Those reads can no longer write."""
        self.block_ids -= block_ids
        self._parts.pool.end_quarantine(block_ids)
        self._parts.engine.wake()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeNode:
    """Made once, when the engine is loaded."""

    parts: EngineParts
    pairs: PairTable
    rules: SessionRules
    unfinished: UnfinishedReads
    engine_metrics: EngineMetrics
    transfer_metrics: TransferMetrics

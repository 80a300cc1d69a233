"""What the streams of a decode worker share: from its start, and once its engine is there."""

from dataclasses import dataclass

from decode_worker.worker_limits import WorkerLimits
from diptych.telemetry import tracing
from diptych.telemetry.families import EngineMetrics, TransferMetrics
from diptych.timers import Timers
from diptych.worker.engine_parts import EngineParts
from diptych.worker.status import WorkerStatus
from kvtransfer.reader.pairs import PairTable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamDeps:
    """What a stream needs to be open at all."""

    status: WorkerStatus
    timers: Timers
    spans: tracing.Tracing
    max_unsent_events: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamResources:
    """What a stream needs for sequences. Made once, when the engine is loaded."""

    parts: EngineParts
    pairs: PairTable
    limits: WorkerLimits
    engine_metrics: EngineMetrics
    transfer_metrics: TransferMetrics

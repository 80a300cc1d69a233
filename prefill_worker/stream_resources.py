"""What the streams of a prefill worker share: from its start, and once its engine is there."""

from dataclasses import dataclass

from diptych.telemetry import tracing
from diptych.telemetry.families import LeaseMetrics
from diptych.timers import Timers
from diptych.worker.engine_parts import EngineParts
from diptych.worker.status import WorkerStatus
from kvtransfer.source.lease_table import LeaseTable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamDeps:
    """What a stream needs to be open at all."""

    status: WorkerStatus
    timers: Timers
    spans: tracing.Tracing


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamResources:
    """What a stream needs for a lease. Made once, when the engine is loaded."""

    parts: EngineParts
    leases: LeaseTable
    metrics: LeaseMetrics

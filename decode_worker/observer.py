"""Metrics and spans of a decode stream's sequences. Changes nothing. Event loop only."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from opentelemetry.context import Context

from decode_worker.outbox import NewToken
from decode_worker.router_sequences import Fallback
from diptych.engine.scheduling.sequence import Sequence
from diptych.telemetry import attributes, tracing
from diptych.telemetry.families import EngineMetrics, TransferMetrics
from diptych.telemetry.stages import Stage
from diptych.v1 import common_pb2, decode_pb2
from kvtransfer.reader.pull_machine import PullError

CANCELLED = "CANCELLED"
_PREFIX = "PULL_FAILURE_"
FALLBACK_STAGES = {Fallback.LOCAL: Stage.LOCAL_PREFILL, Fallback.RECOMPUTE: Stage.RECOMPUTE}


def failure_name(failure: decode_pb2.PullFailure) -> str:
    """``TRANSPORT`` for PULL_FAILURE_TRANSPORT: the label of metrics and spans."""
    return decode_pb2.PullFailure.Name(failure).removeprefix(_PREFIX)


def outcome_names() -> list[str]:
    """All labels that ``failed`` may use."""
    names = [name.removeprefix(_PREFIX) for name in decode_pb2.PullFailure.keys()]  # noqa: SIM118
    return [*names, CANCELLED]


@dataclass(slots=True)
class _Trace:
    """What is remembered of one sequence for its spans. Monotonic times, s."""

    parent: Context
    num_reused_tokens: int  # whose KV the prefix cache had
    started_at: float | None = None
    fallback: Fallback | None = None  # until its first token


class StreamObserver:
    """One per stream; implements decode_worker.router_sequences.SequenceObserver."""

    def __init__(
        self, spans: tracing.Tracing, engine: EngineMetrics, transfer: TransferMetrics
    ) -> None:
        self._spans = spans
        self._engine = engine
        self._transfer = transfer
        self._traces: dict[int, _Trace] = {}

    def reserved(self, command: decode_pb2.Reserve, seq: Sequence) -> None:
        """Blocks are held."""
        parent = tracing.extract_map(command.trace_context)
        self._traces[command.sequence_id] = _Trace(parent, seq.num_cached_tokens)

    def started(self, seq: Sequence, fallback: Fallback | None) -> None:
        """It runs."""
        if fallback is not None:
            self._engine.local_prefills[fallback.value].inc()
        trace = self._traces.get(seq.key.sequence_id)
        if trace is not None:
            trace.started_at, trace.fallback = time.monotonic(), fallback

    def stepped(self, tokens: Iterable[NewToken]) -> None:
        """New tokens: what had to be computed first is there."""
        for token in tokens:
            trace = self._traces.get(token.sequence_id)
            if trace is None or trace.fallback is None or trace.started_at is None:
                continue
            stage = FALLBACK_STAGES[trace.fallback]
            trace.fallback = None
            self._spans.record(stage, trace.parent, trace.started_at, time.monotonic())

    def ended(self, seq: Sequence, ended: decode_pb2.Ended) -> None:
        """Its last word was said."""
        trace = self._traces.pop(seq.key.sequence_id, None)
        if trace is None or trace.started_at is None:
            return
        self._spans.record(
            Stage.DECODE_RUN,
            trace.parent,
            trace.started_at,
            time.monotonic(),
            attributes={
                attributes.NUM_PREEMPTIONS: ended.num_preemptions,
                attributes.COMPUTED_TOKENS: ended.num_computed_tokens,
            },
            error=ended.failure.reason or None,
        )

    def pulled(self, sequence_id: int, bound_at: float, stats: common_pb2.TransferStats) -> None:
        """A pull was proven."""
        metrics = self._transfer
        metrics.pulls[stats.transport].inc()
        metrics.bytes.inc(stats.num_bytes)
        metrics.pull_bytes.observe(stats.num_bytes)
        metrics.pull_seconds.observe(stats.total_s)
        metrics.read_seconds.observe(stats.read_s)
        metrics.exposed_seconds.observe(stats.exposed_s)
        trace = self._traces.get(sequence_id)
        if trace is None:
            return
        now = time.monotonic()
        facts: dict[str, tracing.AttributeValue] = {
            attributes.TRANSPORT: stats.transport,
            attributes.TRANSFER_BYTES: stats.num_bytes,
            attributes.TRANSFER_TOKENS: stats.num_tokens,
            attributes.TRANSFER_REUSED_TOKENS: trace.num_reused_tokens,
            attributes.TRANSFER_READ_S: stats.read_s,
            attributes.TRANSFER_EXPOSED_S: stats.exposed_s,
        }
        if stats.read_s:
            facts[attributes.TRANSFER_GB_PER_S] = stats.num_bytes / stats.read_s / 1e9
        self._spans.record(Stage.TRANSFER, trace.parent, bound_at, now, attributes=facts)
        exposed_at = now - stats.exposed_s
        self._spans.record(Stage.TRANSFER_EXPOSED, trace.parent, exposed_at, now)

    def pull_failed(self, sequence_id: int, bound_at: float, error: PullError | None) -> None:
        """A pull ended without proof; None: it was not wanted any more."""
        name = CANCELLED if error is None else failure_name(error.failure)
        self._transfer.failed_pulls[name].inc()
        trace = self._traces.get(sequence_id)
        if trace is not None:
            now = time.monotonic()
            self._spans.record(Stage.TRANSFER, trace.parent, bound_at, now, error=name)

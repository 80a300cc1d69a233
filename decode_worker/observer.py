"""Metrics and spans of a decode stream's sequences. Changes nothing. Event loop only."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from opentelemetry.context import Context

from decode_worker.outbox import NewToken
from decode_worker.router_sequences import Fallback
from diptych.engine.scheduling.sequence import Sequence
from diptych.errors import LeaseExpiredError
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


class Pulling(NamedTuple):
    """A pull that runs: whose it is, what its span hangs under, and since when (monotonic, s)."""

    sequence_id: int
    parent: Context
    bound_at: float
    num_reused_tokens: int  # that it need not bring


class _LeaseEnded(NamedTuple):
    """A pull whose lease ended under it, at ``at`` (monotonic, s); ``name`` if it was wanted."""

    pulling: Pulling
    name: str
    at: float


@dataclass(slots=True)
class _Trace:
    """What is remembered of one sequence for its spans. Monotonic times, s."""

    run: Context  # what its run hangs under
    attempt: Context  # what its pulls and the computing of its prompt hang under
    num_reused_tokens: int  # whose KV the prefix cache had
    started_at: float | None = None
    fallback: Fallback | None = None  # until its first token
    leases_ended: list[_LeaseEnded] = field(default_factory=list)  # until the router says more


class StreamObserver:
    """One per stream; implements decode_worker.router_sequences.SequenceObserver.

    A router that wants a request no more ends its lease and releases its sequence, and the source
    may tell of the first before the second comes: such a pull is told of with the next command.
    """

    def __init__(
        self, spans: tracing.Tracing, engine: EngineMetrics, transfer: TransferMetrics
    ) -> None:
        self._spans = spans
        self._engine = engine
        self._transfer = transfer
        self._traces: dict[int, _Trace] = {}

    def reserved(self, command: decode_pb2.Reserve, seq: Sequence) -> None:
        """Blocks are held."""
        run = tracing.extract_map(command.trace_context)
        self._traces[command.sequence_id] = _Trace(run, run, seq.num_cached_tokens)

    def bound(self, command: decode_pb2.Bind) -> None:
        """A pull is about to begin."""
        self._tell_leases_ended(self._traces.get(command.sequence_id))
        self._set_attempt(command.sequence_id, command.trace_context)

    def started(self, command: decode_pb2.Start, seq: Sequence, fallback: Fallback | None) -> None:
        """It runs."""
        self._tell_leases_ended(self._traces.get(command.sequence_id))
        self._set_attempt(command.sequence_id, command.trace_context)
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
            self._spans.record(stage, trace.attempt, trace.started_at, time.monotonic())

    def ended(self, seq: Sequence, ended: decode_pb2.Ended) -> None:
        """Its last word was said."""
        trace = self._traces.pop(seq.key.sequence_id, None)
        is_released = not ended.HasField("failure")
        self._tell_leases_ended(trace, CANCELLED if is_released else None)
        if trace is None or trace.started_at is None:
            return
        self._spans.record(
            Stage.DECODE_RUN,
            trace.run,
            trace.started_at,
            time.monotonic(),
            attributes={
                attributes.NUM_PREEMPTIONS: ended.num_preemptions,
                attributes.COMPUTED_TOKENS: ended.num_computed_tokens,
            },
            error=ended.failure.reason or None,
            links=tracing.links_to(trace.attempt),
        )

    def pulling(self, sequence_id: int) -> Pulling:
        """The sequence's newest pull begins: for what is told of it later."""
        trace, now = self._traces.get(sequence_id), time.monotonic()
        if trace is None:
            return Pulling(sequence_id, Context(), now, 0)
        return Pulling(sequence_id, trace.attempt, now, trace.num_reused_tokens)

    def pulled(self, pulling: Pulling, stats: common_pb2.TransferStats) -> None:
        """A pull was proven."""
        metrics = self._transfer
        metrics.pulls[stats.transport].inc()
        metrics.bytes.inc(stats.num_bytes)
        metrics.pull_bytes.observe(stats.num_bytes)
        metrics.pull_seconds.observe(stats.total_s)
        metrics.read_seconds.observe(stats.read_s)
        metrics.exposed_seconds.observe(stats.exposed_s)
        now = time.monotonic()
        facts: dict[str, tracing.AttributeValue] = {
            attributes.TRANSPORT: stats.transport,
            attributes.TRANSFER_BYTES: stats.num_bytes,
            attributes.TRANSFER_TOKENS: stats.num_tokens,
            attributes.TRANSFER_REUSED_TOKENS: pulling.num_reused_tokens,
            attributes.TRANSFER_READ_S: stats.read_s,
            attributes.TRANSFER_EXPOSED_S: stats.exposed_s,
        }
        if stats.read_s:
            facts[attributes.TRANSFER_GB_PER_S] = stats.num_bytes / stats.read_s / 1e9
        whole = self._spans.record(
            Stage.TRANSFER, pulling.parent, pulling.bound_at, now, attributes=facts
        )
        exposed_at = now - stats.exposed_s
        self._spans.record(Stage.TRANSFER_EXPOSED, whole, exposed_at, now)

    def pull_failed(self, pulling: Pulling, error: PullError | None) -> None:
        """A pull ended without proof; None: it was not wanted any more."""
        name = CANCELLED if error is None else failure_name(error.failure)
        trace, now = self._traces.get(pulling.sequence_id), time.monotonic()
        if error is None or error.refusal != LeaseExpiredError.reason or trace is None:
            self._tell_failed(pulling, name, now)
        else:
            trace.leases_ended.append(_LeaseEnded(pulling, name, now))

    def _tell_leases_ended(self, trace: _Trace | None, name: str | None = None) -> None:
        """It is known by now whether these pulls were wanted; ``name``: they were not."""
        if trace is None:
            return
        for ended in trace.leases_ended:
            self._tell_failed(ended.pulling, name or ended.name, ended.at)
        trace.leases_ended.clear()

    def _tell_failed(self, pulling: Pulling, name: str, at: float) -> None:
        self._transfer.failed_pulls[name].inc()
        self._spans.record(Stage.TRANSFER, pulling.parent, pulling.bound_at, at, error=name)

    def _set_attempt(self, sequence_id: int, trace_context: Mapping[str, str]) -> None:
        """A router that does not say it hangs everything under the same."""
        trace = self._traces.get(sequence_id)
        if trace is not None and trace_context:
            trace.attempt = tracing.extract_map(trace_context)

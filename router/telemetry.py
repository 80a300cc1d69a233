"""What one request leaves behind: metrics, one trace, one log line."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from opentelemetry.context import Context

from diptych.errors import (
    DeadlineUnreachableError,
    DiptychError,
    InvalidApiKeyError,
    TransferInterruptedError,
    all_reasons,
)
from diptych.finish_reason import FinishReason
from diptych.request_class import RequestClass
from diptych.sampling_params import SamplingParams
from diptych.telemetry import attributes, tracing
from diptych.telemetry.families import RequestMetrics
from diptych.telemetry.metrics import LoopHistogram, Metrics
from diptych.telemetry.stages import Stage
from diptych.telemetry.tracing import Attributes, Tracing
from diptych.tenant import Limits
from router.cluster.worker_clock import ClockOffset
from router.generation.answer import KVPath, Timing, Usage
from router.placement.claim import NO_CLAIM, Claim
from router.placement.explanation import Explanation
from router.placement.types import (
    DecodeOnly,
    Forecast,
    Paired,
    Placement,
    PrefillOnly,
    Why,
    WorkerId,
)
from router.request.actions import Retry
from router.request.observer import Waits
from router.request.response_builder import Moments
from router.tenant_metrics import TenantMetrics
from router.trace import RequestTrace, Workers

logger = logging.getLogger(__name__)

_RATIO_BUCKETS = (0.25, 0.5, 0.7, 0.8, 0.88, 0.94, 1.0, 1.06, 1.12, 1.2, 1.3, 1.5, 2.0, 4.0)

OUTCOMES = ("ok", "cancelled", *all_reasons())


class Gauges(Protocol):
    """Live state that is read at each scrape."""

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_placed(self) -> int: ...

    def num_waiting_of(self, request_class: RequestClass) -> int: ...


class RouterMetrics:
    """All metrics of one router."""

    def __init__(
        self,
        metrics: Metrics,
        room: Gauges,
        num_proven_pairs: Callable[[], float],
        num_ready: Callable[[], tuple[int, int]],
        discovery_age_s: Callable[[], float],
        clock_offsets: Callable[[], Iterable[tuple[str, ClockOffset]]],
        num_cached_blocks: Callable[[], float],
        tenants: TenantMetrics,
    ) -> None:
        self.tenants = tenants
        kv_paths = [path.name.lower() for path in KVPath]
        self.requests = RequestMetrics(metrics, OUTCOMES, kv_paths)
        self.unproven = metrics.counter(
            "kv_unproven_total",
            "Hand-offs whose landed KV was not what was announced. Each is an alarm.",
        )
        self.local = metrics.counters(
            "router_local_prefills_total",
            "Times a decode worker was told to compute a prompt itself, by why: choice (few tokens "
            "were missing there, or there is no prefill pool), no_prefill (none was alive), "
            "recompute (a hand-off failed).",
            "why",
            [why.value for why in Why],
        )
        self._quotas = metrics.counters(
            "router_quota_refusals_total",
            "Requests that were refused because their tenant's quota was used up, by which: see "
            "--quota of the router's settings.",
            "quota",
            Limits._fields,
        )
        self.foretold_ratio = metrics.histogram(
            "router_ttft_foretold_ratio",
            "Time from placement to first token, over what placement predicted had foretold.",
            _RATIO_BUCKETS,
        )
        metrics.read_gauge(
            "router_requests_waiting",
            "Requests that wait in the router for a placement.",
            lambda: room.num_waiting,
        )
        metrics.read_gauges(
            "router_class_requests_waiting",
            "Of these, by class.",
            ("class",),
            lambda: [((each,), float(room.num_waiting_of(each))) for each in RequestClass],
        )
        self._engine_seconds = metrics.counters(
            "router_class_engine_seconds_total",
            "What requests took of the engines, s, both phases together, by class: what they are "
            "charged by in the queue. Estimated by the tokens and what workers say of their steps.",
            "class",
            RequestClass,
        )
        self.unreachable = metrics.counters(
            "router_unreachable_total",
            "Requests that were refused because they were foretold to miss their objectives, by "
            "class.",
            "class",
            RequestClass,
        )
        metrics.read_gauge(
            "router_requests_placed", "Requests that are on workers.", lambda: room.num_placed
        )
        metrics.read_gauge(
            "router_proven_pairs",
            "Pairs of a ready prefill and a ready decode worker proven to move KV.",
            num_proven_pairs,
        )
        metrics.read_gauge(
            "router_cached_blocks",
            "KV blocks that workers told to be in their prefix caches, of all workers together.",
            num_cached_blocks,
        )
        metrics.read_gauges(
            "router_workers_ready",
            "Workers that a request may be placed on, by role.",
            ("role",),
            lambda: [
                ((role,), float(count))
                for role, count in zip(("prefill", "decode"), num_ready(), strict=True)
            ],
        )
        metrics.read_gauge(
            "router_discovery_age_seconds",
            "Time since the source of workers last said where they are, s; what it said stays in "
            "use. 0 for a static list.",
            discovery_age_s,
        )
        metrics.read_gauges(
            "router_worker_clock_offset_seconds",
            "How far the clock of a worker's spans is ahead of the router's, s; negative: behind.",
            ("worker",),
            lambda: [((address,), clock.offset_s) for address, clock in clock_offsets()],
        )
        metrics.read_gauges(
            "router_worker_clock_uncertainty_seconds",
            "How far from that offset the true one may be, s: half a round trip.",
            ("worker",),
            lambda: [((address,), clock.uncertainty_s) for address, clock in clock_offsets()],
        )

    def engine_used(self, request_class: RequestClass, used_s: float) -> None:
        """A request of that class took so much of the engines, s."""
        self._engine_seconds[request_class].inc(used_s)

    def quota_refused(self, quota: str) -> None:
        """A tenant's quota of that name, see Limits, was used up."""
        self._quotas[quota].inc()


class RequestObserver:
    """Follows one request from its arrival to its end. Event loop only."""

    def __init__(
        self,
        metrics: RouterMetrics,
        trace: Tracing,
        request_id: str,
        workers: Workers,
        *,
        slow_s: float | None,
        operation: str,
        model: str,
        metadata: Sequence[tuple[str, str | bytes]],
        received_s: float,
        tenant: str = "",
    ) -> None:
        """``metadata`` is the call's, with the client's W3C context if it sent one.

        ``tenant`` is who asks, by name; empty: nobody who is known.
        ``operation`` and ``model`` are bounded: GenAI's name of it, and what is served.
        A request that waited ``slow_s`` for a token is traced, whatever was sampled.
        """
        self.request_id = request_id
        self.received_s = received_s
        self._tenant = tenant
        self._forecast: Forecast | None = None
        self._class = RequestClass.STANDARD
        self._gen_ai = (operation, attributes.PROVIDER, model)  # labels of those metrics
        self._metrics = metrics
        self._slow_s = slow_s
        self._longest_wait_s = 0.0  # for a token
        self._was_retried = False
        self._trace = RequestTrace(
            trace,
            f"{operation} {model}",
            tracing.extract_metadata(metadata),
            workers,
            received_s=received_s,
            marks={
                attributes.OPERATION_NAME: operation,
                attributes.PROVIDER_NAME: attributes.PROVIDER,
                attributes.REQUEST_MODEL: model,
                attributes.REQUEST_ID: request_id,
            },
        )

    @property
    def context(self) -> Context:
        """Of the request's span, or of the client's."""
        return self._trace.context

    @property
    def attempt_context(self) -> Context:
        """See :class:`router.request.observer.Observer`."""
        return self._trace.attempt

    def resolved(
        self, sampling: SamplingParams, num_prompt_tokens: int, claim: Claim = NO_CLAIM
    ) -> None:
        """The request is valid."""
        self._class = claim.request_class
        self._trace.mark(
            {
                attributes.REQUEST_CLASS: claim.request_class.value,
                attributes.REQUEST_MAX_TOKENS: sampling.max_tokens,
                attributes.REQUEST_TEMPERATURE: sampling.temperature,
                attributes.REQUEST_TOP_K: sampling.top_k,
                attributes.REQUEST_TOP_P: sampling.top_p,
                attributes.INPUT_TOKENS: num_prompt_tokens,
            }
        )

    @property
    def is_traced(self) -> bool:
        """See :class:`router.request.observer.Observer`."""
        return self._trace.is_recorded

    def waits(self, why: Waits) -> None:
        """See :class:`router.request.observer.Observer`. What it waited for last stands."""
        self._trace.mark({attributes.WAITED_FOR: why.value})

    def foretold(self, forecast: Forecast) -> None:
        """See :class:`router.request.observer.Observer`. The last one before workers are asked."""
        self._forecast = forecast

    def placed(self, placement: Placement, why: Explanation) -> None:
        """See :class:`router.request.observer.Observer`."""
        self._trace.choose(
            {
                attributes.PLACEMENT: _name_of(placement),
                attributes.PREFILL_CANDIDATES: [each.text() for each in why.prefill],
                attributes.NUM_PREFILL_CANDIDATES: why.num_prefill,
                attributes.DECODE_CANDIDATES: [each.text() for each in why.decode],
                attributes.NUM_DECODE_CANDIDATES: why.num_decode,
                **_foretold_marks(placement),
            }
        )

    def prefill_asked(self, worker: WorkerId) -> Context:
        """See :class:`router.request.observer.Observer`."""
        self._trace.ask(attributes.PREFILL_WORKER, worker)
        return self._trace.attempt

    def decode_asked(self, worker: WorkerId) -> Context:
        """See :class:`router.request.observer.Observer`."""
        self._trace.ask(attributes.DECODE_WORKER, worker)
        return self._trace.stage(Stage.DECODE)

    def started(self) -> None:
        """The decode worker may run the sequence: its span will be there."""
        self._trace.expect(Stage.DECODE)

    def retried(self, retry: Retry, cause: DiptychError, awaited: Stage) -> None:
        """A fail-over."""
        self._was_retried = True
        self._metrics.requests.retries[retry.value].inc()
        self._alarm_if_unproven(cause)
        marks = {attributes.FALLBACK: retry.value, attributes.ERROR_TYPE: cause.reason}
        self._trace.retry(awaited, marks, cause.reason)
        logger.warning(
            "request failed over",
            extra={"request": self.request_id, "action": retry.value, "cause": cause.message},
        )

    def failed(self, cause: DiptychError) -> None:
        """The request failed."""
        if cause.reason == TransferInterruptedError.reason:
            self._metrics.requests.retries["fail"].inc()
        if cause.reason == DeadlineUnreachableError.reason:
            self._metrics.unreachable[self._class].inc()
            self._trace.mark({attributes.REFUSED_BECAUSE: cause.message})
        self._alarm_if_unproven(cause)

    def _alarm_if_unproven(self, cause: DiptychError) -> None:
        if cause.metadata.get("cause") == "unproven":
            self._metrics.unproven.inc()
            logger.error("KV was unproven", extra={"request": self.request_id})

    def ran_locally(self, why: Why) -> None:
        """A decode worker computes the KV itself."""
        self._metrics.local[why.value].inc()
        self._trace.mark({attributes.FALLBACK: why.value})
        self._trace.mark_attempt({attributes.FALLBACK: why.value})
        self._trace.leave_out(attributes.PREFILL_WORKER)

    def emitted(self, num_tokens: int, gap_s: float | None) -> None:
        """Tokens came from a worker, ``gap_s`` after those before."""
        if gap_s is None:
            self._longest_wait_s = time.monotonic() - self.received_s
        else:
            self._longest_wait_s = max(self._longest_wait_s, gap_s)
            _observe_gap(self._metrics.requests.emission_seconds, num_tokens, gap_s)

    def written(self, num_tokens: int, gap_s: float | None) -> None:
        """A response was written; ``gap_s`` since the one before."""
        if gap_s is not None and num_tokens:
            _observe_gap(self._metrics.requests.itl_seconds, num_tokens, gap_s)

    def ended(
        self,
        outcome: str,
        moments: Moments | None = None,
        usage: Usage | None = None,
        timing: Timing | None = None,
        *,
        finish_reason: FinishReason | None = None,
        num_other_tokens: int = 0,
    ) -> None:
        """The last word; ``outcome`` is ok, cancelled, or the error's reason.

        What is None it did not get to. ``num_other_tokens``: of the choices behind the first,
        whose time ``timing`` does not tell.
        """
        family = self._metrics.requests
        known = outcome if outcome in family.requests else DiptychError.reason
        error = None if outcome in ("ok", "cancelled") else known
        family.requests[known].inc()
        total_s = time.monotonic() - self.received_s
        family.duration_seconds.labels(*self._gen_ai, error or "").observe(total_s)
        queue_s = None
        if moments is not None:
            self._observe_stages(moments)
            self._observe_foretold(moments, timing)
            queue_s = (moments.placed_s or time.monotonic()) - moments.received_s
        self._metrics.tenants.ended(self._tenant, outcome, usage, queue_s)
        if usage is not None and timing is not None:
            self._book(usage, timing, is_ok=outcome == "ok")
            if moments is not None and moments.second_written_s is not None:
                self._observe_pace(usage.num_new_tokens - num_other_tokens, timing)
        if finish_reason is not None:
            self._trace.mark({attributes.FINISH_REASONS: [finish_reason.name.lower()]})
        if outcome != "ok" and finish_reason is None:  # nor was another token to come
            last_s = None if moments is None else moments.last_token_s
            wait_s = time.monotonic() - (last_s or self.received_s)
            self._longest_wait_s = max(self._longest_wait_s, wait_s)
        self._trace.end(moments, error or outcome, error, keep=self._is_kept(error))
        self._log(outcome, usage, timing)

    def _is_kept(self, error: str | None) -> bool:
        """Whether the request is traced although it was not sampled."""
        if self._slow_s is None or error == InvalidApiKeyError.reason:  # not for just anybody
            return False
        is_slow = self._longest_wait_s >= self._slow_s
        return error is not None or self._was_retried or is_slow

    def _book(self, usage: Usage, timing: Timing, *, is_ok: bool) -> None:
        family = self._metrics.requests
        family.input_tokens.inc(usage.num_prompt_tokens)
        family.output_tokens.inc(usage.num_new_tokens)
        family.cached_tokens.inc(usage.num_cached_tokens)
        path, transfer = timing.kv_path.name.lower(), timing.transfer
        if is_ok:
            family.kv_paths[path].inc()
        if timing.ttft_s:
            family.ttft_seconds.labels(*self._gen_ai).observe(timing.ttft_s)
        if transfer is not None:
            family.stage_seconds[Stage.TRANSFER].observe(transfer.total_s)
            family.stage_seconds[Stage.TRANSFER_EXPOSED].observe(transfer.exposed_s)
        self._trace.mark(
            {
                attributes.OUTPUT_TOKENS: usage.num_output_tokens,
                attributes.CACHED_TOKENS: usage.num_cached_tokens,
                attributes.TIME_TO_FIRST_TOKEN: timing.ttft_s,
                attributes.HANDOFF_GAP: timing.handoff_gap_s,
                attributes.KV_PATH: path,
                attributes.ATTEMPT: timing.num_attempts,
                attributes.PREFILL_WORKER: timing.prefill_worker,
                attributes.DECODE_WORKER: timing.decode_worker,
                attributes.TRANSPORT: "" if transfer is None else transfer.transport,
                attributes.TRANSFER_BYTES: 0 if transfer is None else transfer.num_bytes,
                attributes.NUM_PREEMPTIONS: timing.num_preemptions,
            }
        )

    def _observe_pace(self, num_tokens: int, timing: Timing) -> None:
        """Of an answer that brought the client a second token: before that there is none."""
        family = self._metrics.requests
        family.handoff_gap_seconds.observe(timing.handoff_gap_s)
        tpot_s = (timing.handoff_gap_s + timing.decode_s) / (num_tokens - 1)
        family.tpot_seconds.labels(*self._gen_ai).observe(tpot_s)

    def _observe_foretold(self, moments: Moments, timing: Timing | None) -> None:
        """Of a request that one placement brought to its first token."""
        if self._forecast is None or timing is None or timing.num_attempts > 1:
            return
        if moments.placed_s is not None and moments.first_token_s is not None:
            taken_s = moments.first_token_s - moments.placed_s
            self._metrics.foretold_ratio.observe(taken_s / self._forecast.chosen.ttft_s)

    def _observe_stages(self, moments: Moments) -> None:
        """One observation for each stage that was passed."""
        for stage, start_s, stop_s in moments.stages:
            if stop_s is not None:
                self._metrics.requests.stage_seconds[stage].observe(stop_s - start_s)

    def _log(
        self,
        outcome: str,
        usage: Usage | None,
        timing: Timing | None,
    ) -> None:
        fields: dict[str, object] = {"request_id": self.request_id, "outcome": outcome}
        trace_id = tracing.trace_id(self.context)
        if trace_id:
            fields["trace_id"] = trace_id
        if usage is not None:
            fields["num_prompt_tokens"] = usage.num_prompt_tokens
            fields["num_output_tokens"] = usage.num_output_tokens
        if timing is not None:
            fields["ttft_s"] = round(timing.ttft_s, 4)
            fields["total_s"] = round(timing.total_s, 4)
            fields["num_attempts"] = timing.num_attempts
        logger.info("request ended", extra=fields)


def _foretold_marks(placement: Placement) -> Attributes:
    forecast = None if isinstance(placement, PrefillOnly) else placement.forecast
    if forecast is None:
        return {}
    return {
        attributes.FORETOLD_TTFT: forecast.chosen.ttft_s,
        attributes.FORETOLD_TPOT: forecast.chosen.tpot_s,
        attributes.FORETOLD_CANDIDATES: [each.text() for each in forecast.candidates],
    }


def _name_of(placement: Placement) -> str:
    match placement:
        case Paired():
            return "paired"
        case PrefillOnly():
            return "prefill_only"
        case DecodeOnly():
            return placement.why.value


def _observe_gap(histogram: LoopHistogram, num_tokens: int, gap_s: float) -> None:
    """Tokens that come together have no gaps between them."""
    histogram.observe(gap_s)
    if num_tokens > 1:
        histogram.observe(0.0, num_tokens - 1)

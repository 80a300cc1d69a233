"""What one request leaves behind: metrics, one trace, one log line."""

import logging
import time
from typing import Final, NamedTuple

from opentelemetry.context import Context

from diptych.errors import (
    DeadlineUnreachableError,
    DiptychError,
    InvalidApiKeyError,
    TransferInterruptedError,
)
from diptych.finish_reason import FinishReason
from diptych.request_class import RequestClass
from diptych.sampling_params import SamplingParams
from diptych.telemetry import attributes, tracing
from diptych.telemetry.stages import Stage
from diptych.telemetry.tracing import Attributes, Metadata, Tracing
from router.generation.answer import Timing, Usage
from router.metrics import RouterMetrics
from router.placement.claim import NO_CLAIM, Claim
from router.placement.explanation import Explanation
from router.placement.placement import DecodeOnly, Forecast, Paired, Placement, PrefillOnly, Why
from router.placement.views import WorkerId
from router.request.actions import Retry
from router.request.observer import Waits
from router.request.response_builder import Moments
from router.trace import RequestTrace, Workers

logger = logging.getLogger(__name__)

_NOWHERE: Final = Tracing("nowhere")


class Telemetry(NamedTuple):
    """What every request of one router is told to."""

    metrics: RouterMetrics
    spans: Tracing
    workers: Workers
    model: str  # what is served: a label
    slow_s: float | None  # who waited so long for a token is traced, whatever was sampled


class RequestObserver:
    """Follows one request from its arrival, which is now, to its end. Event loop only."""

    def __init__(
        self,
        telemetry: Telemetry,
        request_id: str,
        *,
        operation: str,
        metadata: Metadata,
        tenant: str = "",
        is_traced: bool = True,
    ) -> None:
        """``operation`` is GenAI's name of it, of which there are few.

        ``metadata`` is the call's, with the client's W3C context if it sent one.
        ``tenant`` is who asks, by name; empty: nobody who is known. Who is not let in costs no
        trace: ``is_traced``.
        """
        self.request_id = request_id
        self.received_s = time.monotonic()
        self._tenant = tenant
        self._forecast: Forecast | None = None
        self._class = RequestClass.STANDARD
        model = telemetry.model
        self._gen_ai = (operation, attributes.PROVIDER, model)  # labels of those metrics
        self._metrics = telemetry.metrics
        self._slow_s = telemetry.slow_s
        self._longest_wait_s = 0.0  # for a token
        self._was_retried = False
        self._trace = RequestTrace(
            telemetry.spans if is_traced else _NOWHERE,
            f"{operation} {model}",
            tracing.extract_metadata(metadata),
            telemetry.workers,
            received_s=self.received_s,
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
            self._metrics.requests.emission_seconds.observe_together(num_tokens, gap_s)

    def written(self, num_tokens: int, gap_s: float | None) -> None:
        """A response was written; ``gap_s`` since the one before."""
        if gap_s is not None and num_tokens:
            self._metrics.requests.itl_seconds.observe_together(num_tokens, gap_s)

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
        """Of a request that one placement brought to its first token, if that was to take time."""
        if self._forecast is None or timing is None or timing.num_attempts > 1:
            return
        foretold_s = self._forecast.chosen.ttft_s
        if foretold_s <= 0.0:  # by a worker whose steps are said to cost nothing
            return
        if moments.placed_s is not None and moments.first_token_s is not None:
            taken_s = moments.first_token_s - moments.placed_s
            waited_s = moments.placed_s - moments.received_s
            whole_ratio = (waited_s + taken_s) / (waited_s + foretold_s)
            self._metrics.foretold_ratio.observe(taken_s / foretold_s)
            self._metrics.foretold_whole_ratio.observe(whole_ratio)

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

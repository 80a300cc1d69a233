"""What single tenants took of this router, in series that its operator is told and no client."""

import enum

import grpc

from diptych.errors import reasons_with
from diptych.telemetry.metrics import Metrics
from router.generation.answer import Usage

OTHERS = "other"
_REFUSALS = reasons_with(grpc.StatusCode.RESOURCE_EXHAUSTED)


class Ending(enum.StrEnum):
    """How a request ended, told coarsely: each has a series of each tenant."""

    OK = "ok"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    FAILED = "failed"


class TenantMetrics:
    """Counts what tenants took. Event loop only; not for the eyes of clients.

    The first ``max_tenants`` that ask have series of their own, for counts may never move from
    one series to another; all who come later are told as one, ``other``, and so is a tenant of
    that name. Requests of nobody (where nobody is asked for a key, or the key was wrong) are
    in no series here.
    """

    def __init__(self, metrics: Metrics, max_tenants: int) -> None:
        """``max_tenants`` of 0: nothing is counted."""
        self._max_tenants = max_tenants
        self._known: set[str] = set()
        self._requests = metrics.labelled_counter(
            "tenant_requests_total",
            "Requests of a tenant that ended, by how: ok, cancelled, refused (a quota, the queue "
            "or an objective left no room) or failed (any other error, the request's own too).",
            ("tenant", "ending"),
        )
        self._input_tokens = metrics.labelled_counter(
            "tenant_input_tokens_total", "Prompt tokens of a tenant's requests.", ("tenant",)
        )
        self._cached_tokens = metrics.labelled_counter(
            "tenant_cached_tokens_total",
            "Of a tenant's prompt tokens, those whose KV no worker had to compute.",
            ("tenant",),
        )
        self._output_tokens = metrics.labelled_counter(
            "tenant_output_tokens_total",
            "Output tokens made for a tenant's requests, those of choices that best_of left out "
            "too.",
            ("tenant",),
        )
        self._queue_seconds = metrics.labelled_counter(
            "tenant_queue_seconds_total",
            "Time that a tenant's generations waited for a placement, or in vain for one, s.",
            ("tenant",),
        )

    def ended(self, tenant: str, outcome: str, usage: Usage | None, queue_s: float | None) -> None:
        """A request did: with an outcome as the router's metrics have it.

        What is None it did not get to: workers, or the queue.
        """
        if not tenant or not self._max_tenants:
            return
        name = self._name(tenant)
        self._requests.labels(name, _ending(outcome)).inc()
        if usage is not None:
            self._input_tokens.labels(name).inc(usage.num_prompt_tokens)
            self._cached_tokens.labels(name).inc(usage.num_cached_tokens)
            self._output_tokens.labels(name).inc(usage.num_new_tokens)
        if queue_s is not None:
            self._queue_seconds.labels(name).inc(queue_s)

    def _name(self, tenant: str) -> str:
        """As whom the tenant is told."""
        if tenant not in self._known:
            if len(self._known) >= self._max_tenants:
                return OTHERS
            self._known.add(tenant)
        return tenant


def _ending(outcome: str) -> Ending:
    if outcome in (Ending.OK, Ending.CANCELLED):
        return Ending(outcome)
    return Ending.REFUSED if outcome in _REFUSALS else Ending.FAILED

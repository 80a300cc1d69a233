"""What of OpenTelemetry's own variables is left to its SDK."""

from typing import Final, NamedTuple

SDK_MAX_QUEUED: Final = 2048  # spans, where it is not said


class StandardTracing(NamedTuple):
    """Which of OpenTelemetry's own variables (``OTEL_*``) are set."""

    has_endpoint: bool = False
    is_http: bool = False  # where there is an endpoint: OTLP over HTTP, not over gRPC
    has_service_name: bool = False
    has_sampler: bool = False
    has_batching: bool = False
    max_queued: int = SDK_MAX_QUEUED  # spans; with has_batching


NOTHING_STANDARD: Final = StandardTracing()

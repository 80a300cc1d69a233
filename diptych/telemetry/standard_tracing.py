"""What of OpenTelemetry's own variables (``OTEL_*``) is left to its SDK.

Some hold secrets, which are in no error here. The SDK warns of what it cannot read by quoting
it: ``logs.set_up`` silences that, and what is wrong is told here.
"""

import logging
from collections.abc import Mapping
from typing import Final, NamedTuple

from diptych.errors import ConfigurationError
from diptych.telemetry.endpoints import check_endpoint

logger = logging.getLogger(__name__)

SDK_MAX_QUEUED: Final = 2048  # spans, where it is not said
# What is said of traces alone comes before what is said of every signal.
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_HTTP: Final = "http/protobuf"
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_HEADERS: Final = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
_TIMEOUTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")


class StandardTracing(NamedTuple):
    """Which of OpenTelemetry's own variables (``OTEL_*``) are set."""

    is_disabled: bool = False  # nothing is traced, whatever else is set
    has_endpoint: bool = False
    is_http: bool = False  # where there is an endpoint: OTLP over HTTP, not over gRPC
    has_service_name: bool = False
    has_sampler: bool = False
    has_batching: bool = False
    has_timeout: bool = False  # of an export
    max_queued: int = SDK_MAX_QUEUED  # spans; with has_batching


NOTHING_STANDARD: Final = StandardTracing()


def read_standard(asked: Mapping[str, str], endpoint: str | None) -> StandardTracing:
    """What OpenTelemetry's own variables, ``asked``, decide instead of our settings.

    ``endpoint`` is our setting, which comes before theirs and is served as it says.
    Raises ConfigurationError: they ask for what is not served.
    """
    is_wanted = asked.get("OTEL_TRACES_EXPORTER", "").strip() != "none"
    has_endpoint = endpoint is None and is_wanted and any(name in asked for name in _ENDPOINTS)
    protocol = next((name for name in _PROTOCOLS if name in asked), None)
    if has_endpoint and protocol is not None and asked[protocol] not in ("grpc", _HTTP):
        raise ConfigurationError(
            f"environment: {protocol}: spans are sent by grpc or {_HTTP} (got {asked[protocol]!r})"
        )
    if has_endpoint:
        _check_endpoints(asked)
    if has_endpoint or endpoint is not None:
        _check_headers(asked)
    return StandardTracing(
        is_disabled=asked.get("OTEL_SDK_DISABLED", "").strip().lower() == "true",
        has_endpoint=has_endpoint,
        is_http=has_endpoint and protocol is not None and asked[protocol] == _HTTP,
        has_service_name=_names_service(asked),
        has_sampler="OTEL_TRACES_SAMPLER" in asked,
        has_batching=any(name.startswith("OTEL_BSP_") for name in asked),
        has_timeout=any(name in asked for name in _TIMEOUTS),
        max_queued=_max_queued(asked),
    )


def _names_service(asked: Mapping[str, str]) -> bool:
    """By the variable for that, or among what is said of the process."""
    parts = [each.partition("=") for each in asked.get("OTEL_RESOURCE_ATTRIBUTES", "").split(",")]
    named = [value for name, _, value in parts if name.strip() == "service.name"]
    return "OTEL_SERVICE_NAME" in asked or bool(named and named[-1].strip())


def _check_endpoints(asked: Mapping[str, str]) -> None:
    for name in _ENDPOINTS:
        try:
            check_endpoint(asked.get(name, ""))
        except ValueError as error:
            raise ConfigurationError(f"environment: {name}: {error}") from None


def _check_headers(asked: Mapping[str, str]) -> None:
    """Raises ConfigurationError: with these no span could be sent."""
    from opentelemetry.util.re import parse_env_headers

    for name in _HEADERS:
        given = [part for part in asked.get(name, "").split(",") if part.strip()]
        read = [parse_env_headers(part, liberal=True) for part in given]
        if not all(read):
            why = "expected name=value, with commas between them, each in percent-encoding"
            logger.error("header not sent to the collector", extra={"variable": name, "why": why})
        for value in (value for header in read for value in header.values()):
            if not (value.isascii() and value.isprintable()):
                raise ConfigurationError(
                    f"environment: {name}: expected ASCII that can be printed (got something else)"
                )


def _max_queued(asked: Mapping[str, str]) -> int:
    """As the SDK reads it: what is no number says nothing."""
    try:
        return int(asked.get("OTEL_BSP_MAX_QUEUE_SIZE", SDK_MAX_QUEUED))
    except ValueError:
        return SDK_MAX_QUEUED

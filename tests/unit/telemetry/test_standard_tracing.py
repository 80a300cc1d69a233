"""What is secret in OpenTelemetry's own variables, and what clients send, is in no log line."""

import io
import json
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export import SpanExporter

from diptych import settings
from diptych.errors import ConfigurationError
from diptych.process import ProcessConfig
from diptych.service_host import standard_tracing
from diptych.telemetry import logs
from diptych.telemetry.span_provider import EXPORT_TIMEOUT_S, exporter_to
from diptych.telemetry.tracing import Tracing, extract_metadata


@pytest.mark.parametrize("name", ["OTLP_ENDPOINT", "OTLP_TRACES_ENDPOINT"])
@pytest.mark.parametrize(
    "secret", ["http://user:hunter2@host:1", "http://host:1?key=hunter2", "http://h#hunter2"]
)
def test_a_secret_in_an_address_is_refused_and_not_repeated(
    monkeypatch: pytest.MonkeyPatch, name: str, secret: str
) -> None:
    monkeypatch.setenv(f"OTEL_EXPORTER_{name}", secret)
    with pytest.raises(ConfigurationError, match=f"OTEL_EXPORTER_{name}: .*no user") as caught:
        standard_tracing()
    assert "hunter2" not in caught.value.message
    standard_tracing("http://host:1")
    with pytest.raises(ConfigurationError, match=r"--otlp-endpoint: .*no user") as caught:
        settings.load(ProcessConfig, ["--otlp-endpoint", secret], prog="diptych", env_prefix="X_")
    assert "hunter2" not in caught.value.message


@pytest.mark.parametrize("scheme", ["http://", ""])
@pytest.mark.parametrize("port", ["99999", "0", "otlp", "-1"])
def test_a_port_that_is_none_is_refused(
    monkeypatch: pytest.MonkeyPatch, scheme: str, port: str
) -> None:
    """Of a number that is too large gRPC takes what is left in 16 bits: spans went elsewhere."""
    endpoint = f"{scheme}127.0.0.1:{port}"
    with pytest.raises(ConfigurationError, match=r"--otlp-endpoint: expected a port from 1 to "):
        settings.load(ProcessConfig, ["--otlp-endpoint", endpoint], prog="x", env_prefix="X_")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    with pytest.raises(ConfigurationError, match="OTEL_EXPORTER_OTLP_ENDPOINT: expected a port"):
        standard_tracing()


@pytest.mark.parametrize("name", ["OTLP_HEADERS", "OTLP_TRACES_HEADERS"])
@pytest.mark.parametrize(
    "wrong", ["authorization: Bearer s3cret", "authorization=Bearer s3,cret", "a=é s3cret"]
)
def test_headers_that_are_wrong_are_told_by_their_variable_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, wrong: str
) -> None:
    monkeypatch.setenv(f"OTEL_EXPORTER_{name}", f"a=b, {wrong},")
    out = io.StringIO()
    logs.set_up("test", stream=out)
    endpoint = "http://127.0.0.1:1"
    Tracing("test", endpoint=endpoint, standard=standard_tracing(endpoint)).shutdown()
    logs.flush()
    (line,) = [json.loads(line) for line in out.getvalue().splitlines()]
    assert line["variable"] == f"OTEL_EXPORTER_{name}"
    assert line["message"] == "header not sent to the collector"
    assert "s3" not in out.getvalue()
    assert "cret" not in out.getvalue()


@pytest.mark.parametrize("wrong", ["a=s3%0Acret", "a=s3cret%C3%A9", "a=b,c=s3cret%00"])
def test_headers_that_cannot_be_sent_are_refused(
    monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", wrong)
    standard_tracing()  # nothing is traced
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ConfigurationError, match="OTEL_EXPORTER_OTLP_HEADERS: ") as caught:
        standard_tracing()
    assert "s3" not in caught.value.message


def test_what_clients_send_as_context_of_a_trace_is_no_log_line() -> None:
    out = io.StringIO()
    logs.set_up("test", stream=out)
    parent = ("traceparent", f"00-{'a' * 32}-{'b' * 16}-01")
    for state in ("not a state", "a=1,a=2", ",".join(f"k{i}=1" for i in range(40))):
        extract_metadata((parent, ("tracestate", state)))
    extract_metadata((("traceparent", "x" * 600),))
    logs.flush()
    assert not out.getvalue()


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("BSP_MAX_QUEUE_SIZE", "100", "max_queue_size"),
        ("BSP_SCHEDULE_DELAY", "0", "schedule_delay"),
        ("SPAN_ATTRIBUTE_COUNT_LIMIT", "many", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"),
        ("EXPORTER_OTLP_COMPRESSION", "brotli", "OTEL_EXPORTER_OTLP_COMPRESSION"),
        ("EXPORTER_OTLP_TIMEOUT", "soon", "soon"),
    ],
)
def test_what_the_sdk_does_not_take_is_refused_in_a_line(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, why: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv(f"OTEL_{name}", value)
    with pytest.raises(ConfigurationError, match=f"environment: OTEL_.*{why}"):
        Tracing("test", standard=standard_tracing())


def test_a_certificate_that_cannot_be_read_is_refused_in_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "https://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(tmp_path))
    with pytest.raises(ConfigurationError, match=f"environment: OTEL_.*Is a dir.*{tmp_path}"):
        Tracing("test", standard=standard_tracing())


@pytest.mark.parametrize(("exporter", "is_traced"), [("none", False), ("otlp", True)])
def test_an_endpoint_of_other_signals_is_none_of_traces(
    monkeypatch: pytest.MonkeyPatch, exporter: str, is_traced: bool
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", exporter)
    assert standard_tracing().has_endpoint == is_traced
    assert not standard_tracing("http://127.0.0.1:2").has_endpoint, "our setting comes first"


@pytest.mark.parametrize("name", ["OTLP_TIMEOUT", "OTLP_TRACES_TIMEOUT"])
@pytest.mark.parametrize("endpoint", [None, "http://127.0.0.1:1"])
def test_an_export_may_take_as_long_as_the_variables_say(
    monkeypatch: pytest.MonkeyPatch, name: str, endpoint: str | None
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    assert _timeout_s(exporter_to(endpoint, standard_tracing(endpoint))) == EXPORT_TIMEOUT_S
    monkeypatch.setenv(f"OTEL_EXPORTER_{name}", "12.5")
    assert _timeout_s(exporter_to(endpoint, standard_tracing(endpoint))) == 12.5
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    assert _timeout_s(exporter_to(endpoint, standard_tracing(endpoint))) == 12.5


def _timeout_s(exporter: SpanExporter) -> float:
    """As both exporters keep it."""
    over_http = getattr(exporter, "_client", None)
    kept = over_http if hasattr(over_http, "_timeout") else exporter
    exporter.shutdown()
    timeout_s: float = vars(kept)["_timeout"]
    return timeout_s

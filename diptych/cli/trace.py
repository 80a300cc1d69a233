"""``diptych trace``: look at recorded traces without a backend for them."""

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field
from pydantic_settings import CliPositionalArg

from diptych import settings
from diptych.cli.jaeger_form import jaeger_form
from diptych.cli.recorded_spans import read_spans
from diptych.cli.shown_line import shown
from diptych.cli.trace_tree import Trace, traces_of
from diptych.cli.waterfall import waterfall
from diptych.errors import ConfigurationError


class TraceConfig(BaseModel):
    """List the traces of a file of OTLP spans; write them for Jaeger, or one as a picture."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: CliPositionalArg[Path] = Field(
        description="OTLP in JSON, one export a line, as a collector's file exporter writes it."
    )
    trace_id: str | None = Field(
        None, description="Only the trace whose id begins so, in hexadecimal."
    )
    jaeger: Path | None = Field(
        None, description="Write the traces here, for Jaeger's user interface to upload."
    )
    svg: Path | None = Field(
        None, description="Draw the trace here; of several, the one that took longest."
    )


def run(args: list[str]) -> int:
    """Read, list, write; the exit code."""
    config = settings.load(TraceConfig, args, prog="diptych trace", env_prefix="DIPTYCH_TRACE_")
    try:
        lines = config.file.read_bytes().split(b"\n")  # of which the last may be half a character
    except OSError as error:
        raise ConfigurationError(f"{config.file}: {error}") from None
    try:
        traces = traces_of(read_spans(lines))
    except ConfigurationError as error:
        raise ConfigurationError(f"{config.file}: {error.message}") from None
    wanted = (config.trace_id or "").lower()
    traces = [trace for trace in traces if trace.trace_id.startswith(wanted)]
    if not traces:
        raise ConfigurationError(f"{config.file}: no such trace")
    for trace in traces:
        print(_line(trace))  # noqa: T201
    if config.jaeger is not None:
        _write("--jaeger", config.jaeger, json.dumps(jaeger_form(traces), indent=1) + "\n")
    if config.svg is not None:
        longest = max(traces, key=lambda trace: trace.end_ns - trace.start_ns)
        _write("--svg", config.svg, waterfall(longest))
    return 0


def _line(trace: Trace) -> str:
    first = trace.rows[0].span
    length_ms = (trace.end_ns - trace.start_ns) / 1e6
    failed = "" if first.error is None else f" {first.error}"
    line = f"{trace.trace_id} {first.name} {length_ms:.1f} ms, {len(trace.rows)} spans{failed}"
    return shown(line)


def _write(flag: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{flag}: {path}: {error.strerror}") from None

"""JSON log lines on stderr: a constant message, fields beside it, request and trace id.

They are written by a thread of their own: the event loop does not wait for who reads them.

``logger.info("request finished", extra={"num_output_tokens": 12})``. Prompts,
outputs and tickets are never logged. The ids come from a context variable, so
that every line a request's task writes carries them.
"""

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from diptych.telemetry.log_writer import LogWriter, RawStandardError, TextStream

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

# Kubernetes is asked by httpx2.
_HTTP = ("httpx", "httpx2", "httpcore", "httpcore2", "urllib3")

# They warn of what clients send as context of a trace, and quote it.
_OF_CLIENTS = ("opentelemetry.trace.propagation.tracecontext", "opentelemetry.trace.span")


class RequestIds(NamedTuple):
    """What a log line says about the request it belongs to."""

    request_id: str
    trace_id: str


_ids: ContextVar[RequestIds | None] = ContextVar("request_ids", default=None)


@contextmanager
def request_ids(request_id: str, trace_id: str = "") -> Iterator[None]:
    """Mark the log lines of this task and its children. Not open across a handler's ``yield``."""
    token = _ids.set(RequestIds(request_id, trace_id))
    try:
        yield
    finally:
        _ids.reset(token)


def mark(request_id: str, trace_id: str = "") -> None:
    """Mark the log lines of this task and its children from now on: the task is the request's."""
    _ids.set(RequestIds(request_id, trace_id))


class JSONFormatter(logging.Formatter):
    """One JSON object a line; what cannot be encoded is shown as text."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        created = time.gmtime(record.created)
        line: dict[str, object] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', created)}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        ids = _ids.get()
        if ids is not None:
            line["request_id"] = ids.request_id
            if ids.trace_id:
                line["trace_id"] = ids.trace_id
        line.update({k: v for k, v in vars(record).items() if k not in _STANDARD})
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def set_up(service: str, level: str = "info", stream: TextStream | None = None) -> None:
    """Send this process's logs to ``stream`` (stderr) as JSON lines. Replaces what was set up."""
    for replaced in _writers():
        replaced.close()
    handler = LogWriter(stream or RawStandardError())
    handler.setFormatter(JSONFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    for noisy in (*_HTTP, "filelock", "asyncio", "opentelemetry"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
    for quoting in ("opentelemetry.util.re", *_OF_CLIENTS):
        logging.getLogger(quoting).setLevel(logging.CRITICAL)
    logging.getLogger("grpc._cython.cygrpc").addFilter(_quotes_no_metadata)


def _quotes_no_metadata(record: logging.LogRecord) -> bool:
    """gRPC logs metadata that is no UTF-8, and it may be a client's key."""
    return not record.getMessage().startswith("Invalid encoding on")


def flush() -> None:
    """Let what was logged get out, within ``log_writer.FLUSH_S``; blocks for that long.

    Before the process ends without its interpreter's end.
    """
    for writer in _writers():
        writer.flush()


def say(line: str) -> bool:
    """Put a line for people after what was logged, as it is; False where no log was set up."""
    writers = _writers()
    for writer in writers:
        writer.say(line)
    return bool(writers)


def num_dropped_lines() -> int:
    """Of all this process's log lines, as standard error was too slow."""
    return sum(writer.num_dropped for writer in _writers())


def _writers() -> list[LogWriter]:
    handlers = logging.getLogger().handlers
    return [handler for handler in handlers if isinstance(handler, LogWriter)]

"""Logs: one line of JSON each, no secret in any, written by a thread of their own."""

import io
import json
import logging
import threading
from types import FrameType

import httpx
import pytest
from lightkube.config import client_adapter

from diptych.telemetry import log_writer, logs
from diptych.telemetry.log_writer import LogWriter


class TestLogs:
    def setup_method(self) -> None:
        root = logging.getLogger()
        self._saved = (root.handlers[:], root.level)
        self.stream = io.StringIO()
        logs.set_up("test", "info", self.stream)

    def teardown_method(self) -> None:
        root = logging.getLogger()
        for handler in set(root.handlers) - set(self._saved[0]):
            handler.close()
        root.handlers[:], level = self._saved
        root.setLevel(level)
        logging.captureWarnings(False)

    def lines(self) -> list[dict[str, object]]:
        logs.flush()
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]

    def test_a_line_is_a_constant_message_and_fields(self) -> None:
        logging.getLogger("a.b").info("done", extra={"num_tokens": 3, "path": object})
        logging.getLogger("a.b").debug("unseen")
        (line,) = self.lines()
        assert line["message"] == "done"
        assert line["num_tokens"] == 3
        assert (line["level"], line["service"], line["logger"]) == ("info", "test", "a.b")
        assert "request_id" not in line

    @pytest.mark.parametrize("library", [httpx.__name__, vars(client_adapter)["httpx"].__name__])
    def test_no_request_that_the_router_makes_is_a_line(self, library: str) -> None:
        """Nor one of those by which it follows Kubernetes."""
        logging.getLogger(library).info("HTTP Request: GET https://host/path")
        logging.getLogger(library.replace("httpx", "httpcore")).info("connect")
        assert not self.lines()

    def test_ids_come_from_the_context(self) -> None:
        with logs.request_ids("r1", "t1"):
            logging.getLogger("a").warning("x")
        logging.getLogger("a").warning("y")
        inside, outside = self.lines()
        assert (inside["request_id"], inside["trace_id"]) == ("r1", "t1")
        assert "request_id" not in outside

    def test_an_exception_stays_on_one_line(self) -> None:
        try:
            raise ValueError("x")
        except ValueError:
            logging.getLogger("a").exception("failed")
        (line,) = self.lines()
        assert "ValueError: x" in str(line["exception"])

    def test_a_stream_that_takes_nothing_keeps_nobody_waiting(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stream = Slow()
        writer = LogWriter(stream, max_lines=2)
        monkeypatch.setattr(log_writer, "FLUSH_S", 0.0)
        logging.getLogger().handlers[:] = [writer]
        logger = logging.getLogger("a")
        logger.info("first")
        stream.is_asked.wait(10)
        for _ in range(5):
            logger.info("more")
        logs.flush()
        assert logs.num_dropped_lines() == 3
        monkeypatch.setattr(log_writer, "FLUSH_S", 10.0)
        stream.goes_on.set()
        logs.flush()
        written = [line.strip() for line in stream.getvalue().splitlines()]
        assert written == ["first", "log lines were dropped", "more", "more"]
        stream.close()
        logger.info("to nobody")
        writer.close()
        assert writer.num_dropped == 4

    def test_a_flush_that_was_in_vain_is_not_repeated(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stream = Slow()
        waits: list[float | None] = []

        class Mark(threading.Event):
            """Counts who waits for it."""

            def wait(self, timeout: float | None = None) -> bool:
                waits.append(timeout)
                return super().wait(0)

        writer = LogWriter(stream)
        writer.emit(logging.makeLogRecord({"msg": "x"}))
        monkeypatch.setattr(threading, "Event", Mark)
        writer.flush()
        writer.close()  # as logging does when the process ends
        assert waits == [log_writer.FLUSH_S]
        stream.goes_on.set()

    def test_a_finalizer_may_log_wherever_the_thread_is(self) -> None:
        """Garbage is collected between any two instructions, those of the queue too."""
        stream, num_said = io.StringIO(), 0
        writers: list[LogWriter] = []

        def say(frame: FrameType, event: str, argument: object) -> None:
            nonlocal num_said
            if event == "call" and writers and num_said < 100:
                num_said += 1
                writers[0].emit(logging.makeLogRecord({"msg": "finalized"}))

        threading.setprofile(say)
        try:
            writer = LogWriter(stream)
        finally:
            threading.setprofile(None)
        writers.append(writer)
        for i in range(5):
            writer.emit(logging.makeLogRecord({"msg": f"line {i}"}))
        writer.flush()
        writer.close()
        assert num_said > 5
        assert writer.num_dropped == 0
        lines = stream.getvalue().splitlines()
        assert [line for line in lines if line != "finalized"] == [f"line {i}" for i in range(5)]


class Slow(io.StringIO):
    """A stream that whoever reads it has stopped reading."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked, self.goes_on = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.is_asked.set()
        self.goes_on.wait(10)
        return super().write(text)

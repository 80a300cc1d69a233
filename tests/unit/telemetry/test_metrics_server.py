"""Whoever connects to the metrics and says nothing costs a bounded number of threads and files."""

import socket
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from socketserver import BaseServer
from urllib.error import HTTPError, URLError

import pytest
from prometheus_client import CollectorRegistry, Gauge, Metric

from diptych.telemetry.metrics_server import MetricsServer

PATIENCE_S = 10.0


@contextmanager
def served(**bounds: float) -> Iterator[int]:
    """The port of a server of one gauge."""
    registry = CollectorRegistry()
    Gauge("x", "X.", registry=registry).set(3)
    server = MetricsServer("127.0.0.1", 0, registry, **bounds)  # type: ignore[arg-type]
    try:
        yield server.port
    finally:
        server.close()


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), PATIENCE_S)


def is_ended(connection: socket.socket) -> bool:
    """Waits until the other side has closed it. Raises TimeoutError."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def is_refused(connection: socket.socket) -> bool:
    """Whether the other side takes no more."""
    try:
        connection.sendall(b"G")
    except ConnectionError:
        return True
    return False


def scraped(port: int, accept: str = "*/*") -> str:
    """Raises OSError."""
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"accept": accept})
    with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
        text: bytes = answer.read()
    return text.decode()


def test_who_asks_while_nobody_can_answer_hears_so(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """As where the event loop is stuck: one line in the log, and no traceback beside it."""

    class Stuck(CollectorRegistry):
        def collect(self) -> Iterator[Metric]:
            raise TimeoutError

    server = MetricsServer("127.0.0.1", 0, Stuck())
    try:
        with pytest.raises(HTTPError) as caught:
            scraped(server.port)
        caught.value.close()
    finally:
        server.close()
    assert caught.value.code == 503
    assert [each.message for each in caplog.records] == [
        "metrics not told: the event loop does not answer"
    ]
    assert "Traceback" not in capfd.readouterr().err


def test_who_asks_is_told_the_metrics() -> None:
    with served() as port:
        for _ in range(20):
            assert "\nx 3.0\n" in scraped(port)


@pytest.mark.parametrize("kind", ["text/plain", "application/openmetrics-text"])
@pytest.mark.parametrize("version", ["abc", "1.x", "1." + "9" * 5000, "", "9.9"])
def test_versions_that_nobody_has_are_no_failure(kind: str, version: str) -> None:
    with served() as port:
        assert "\nx 3.0\n" in scraped(port, f"{kind}; version={version}")


def test_connections_over_the_bound_are_closed_and_those_below_it_served() -> None:
    with served(max_connections=3) as port, ExitStack() as stack:
        silent = [stack.enter_context(connected(port)) for _ in range(3)]
        for _ in range(5):
            assert is_ended(stack.enter_context(connected(port)))
        with pytest.raises((URLError, ConnectionError)):
            scraped(port)
        silent[0].sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        answer = b"".join(iter(lambda: silent[0].recv(2**16), b""))
        assert b"\nx 3.0\n" in answer


def test_one_that_is_silent_is_closed_and_leaves_room() -> None:
    with served(max_connections=1, silence_s=0.01) as port, connected(port) as silent:
        assert is_ended(silent)
        while True:  # until its thread is done with it
            try:
                assert "\nx 3.0\n" in scraped(port)
                break
            except OSError:
                continue


def test_one_that_says_a_little_all_the_time_is_closed() -> None:
    with served(longest_s=0.0) as port, connected(port) as dripping:
        while not is_refused(dripping):
            continue


@pytest.mark.timeout(PATIENCE_S)
def test_its_end_does_not_wait_until_it_looks_the_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serve = BaseServer.serve_forever
    monkeypatch.setattr(BaseServer, "serve_forever", lambda server: serve(server, 3600.0))
    with served():  # also where it has only just begun
        pass
    with served() as port:
        assert "\nx 3.0\n" in scraped(port)


def test_dns_is_not_asked_for_our_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody answers that takes half a minute, in which an event loop would stand still."""

    def ask(name: str) -> str:
        raise AssertionError(f"asked for {name}")

    monkeypatch.setattr(socket, "getfqdn", ask)
    with served() as port:
        assert "\nx 3.0\n" in scraped(port)

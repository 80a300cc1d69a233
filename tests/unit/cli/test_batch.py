"""``diptych batch`` beside a server that is a function."""

import json
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import grpc
import httpx
import pytest

from diptych.cli import batch
from diptych.cli.batch_client import BatchError
from diptych.cli.batch_over_grpc import GrpcBatchClient
from diptych.cli.batch_over_http import HttpBatchClient
from diptych.client import BatchState
from diptych.errors import ConfigurationError
from diptych.rpc.status import remote_error
from tests.unit.cli.asked_server import by, client_of, told


def test_it_waits_until_the_batch_has_ended() -> None:
    states = iter([told("in_progress", 1), told("in_progress", 2), told("completed", 3, 1)])
    pauses: list[float] = []
    with client_of(lambda request: httpx.Response(200, json=next(states))) as client:
        ended = batch.wait_for(client, client.state("b"), pauses.append)
    assert (ended.status, ended.done_ratio) == ("completed", 1.0)
    assert len(pauses) == 2


@pytest.mark.parametrize(
    ("status", "num_failed", "code"),
    [
        ("in_progress", 1, 0),
        ("completed", 0, 0),
        ("completed", 1, 1),
        ("failed", 1, 1),
        ("expired", 1, 1),
    ],
)
def test_the_exit_code_says_whether_all_was_answered(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: str,
    num_failed: int,
    code: int,
) -> None:
    errors = {"data": [{"message": "line 3: custom_id: is that of a line before"}]}
    by(
        monkeypatch,
        lambda request: httpx.Response(200, json=told(status, 2, num_failed, errors=errors)),
    )
    assert batch.run(["status", "b"]) == code
    written = capsys.readouterr().err
    assert f"b {status}: 2 answered, {num_failed} failed of 4" in written
    assert "line 3: custom_id" in written


def test_results_are_written_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    def server(request: httpx.Request) -> httpx.Response:
        if request.url.path.startswith("/v1/files"):
            return httpx.Response(200, content=f"{request.url.path}\n".encode())
        files: dict[str, Any] = {"output_file_id": "f", "error_file_id": "g"}
        return httpx.Response(200, json=told("completed", 4, **files))

    by(monkeypatch, server)
    assert batch.run(["results", "b"]) == 0
    assert batch.run(["results", "b", "--errors"]) == 0
    written = capsysbinary.readouterr().out
    assert written == b"/v1/files/f/content\n/v1/files/g/content\n"


@pytest.mark.parametrize("flags", [[], ["--errors"]])
def test_where_there_is_no_file_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes], flags: list[str]
) -> None:
    """Of a batch without lines that failed, or without any that were answered."""

    def server(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/v1/batches/b"
        return httpx.Response(200, json=told("cancelled"))

    by(monkeypatch, server)
    assert batch.run(["results", "b", *flags]) == 0
    assert capsysbinary.readouterr() == (b"", b"")


@pytest.mark.parametrize("flags", [[], ["--errors"]])
def test_a_batch_that_failed_has_no_results_and_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    errors = {"data": [{"message": "line 3: no JSON"}, {"message": "line 4: no JSON"}]}
    by(monkeypatch, lambda request: httpx.Response(200, json=told("failed", errors=errors)))
    assert batch.run(["results", "b", *flags]) == 1
    said = ["b failed: 0 answered, 0 failed of 4", "line 3: no JSON", "line 4: no JSON"]
    assert capsys.readouterr().err.splitlines() == said


def test_what_the_server_refuses_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = {"error": {"message": "no batch 'b' here"}}
    by(monkeypatch, lambda request: httpx.Response(404, json=error))
    assert batch.run(["cancel", "b"]) == 1
    assert capsys.readouterr().err == "diptych batch: no batch 'b' here\n"
    by(monkeypatch, lambda request: httpx.Response(200, json=told("in_progress")))
    assert batch.run(["results", "b"]) == 1
    assert "no results yet" in capsys.readouterr().err


def test_what_is_no_batch_server_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    by(monkeypatch, lambda request: httpx.Response(200, text="<html>Welcome!</html>"))
    assert batch.run(["status", "b"]) == 1
    said = "diptych batch: http://there: what answers there is no batch server\n"
    assert capsys.readouterr().err == said
    others: list[object] = [{"object": "list"}, [], "welcome", told("failed", request_counts=3)]
    by(monkeypatch, lambda request: httpx.Response(200, json=others.pop()))
    while others:
        assert batch.run(["status", "b"]) == 1
        assert capsys.readouterr().err == said


@pytest.mark.parametrize("command", ["status", "cancel"])
def test_an_id_is_one_part_of_a_path(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    paths: list[bytes] = []

    def server(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.raw_path)
        return httpx.Response(200, json=told("completed"))

    by(monkeypatch, server)
    assert batch.run([command, "../files?x#y z"]) == 0
    assert paths[0].removesuffix(b"/cancel") == b"/v1/batches/..%2Ffiles%3Fx%23y%20z"


def test_a_server_that_is_away_is_told() -> None:
    def server(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with client_of(server) as client, pytest.raises(BatchError, match="refused"):
        client.state("b")


class Proxy(BaseHTTPRequestHandler):
    """Answers in the place of whom it is asked for."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        body = json.dumps(told("completed", 4)).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


def test_a_proxy_of_the_environment_is_gone_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """As other commands do: unless ``no_proxy`` has the server, or it is on this machine."""
    monkeypatch.setattr(Proxy, "asked", [])
    with HTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.server_port}")
        monkeypatch.setenv("no_proxy", "")
        serving = threading.Thread(target=proxy.handle_request, daemon=True)
        serving.start()
        with HttpBatchClient("http://batches.example:8001") as client:
            assert client.state("b").status == "completed"
        serving.join()
    assert Proxy.asked == ["http://batches.example:8001/v1/batches/b"]
    with HttpBatchClient("http://127.0.0.1:1") as client, pytest.raises(BatchError):
        client.state("b")
    monkeypatch.setenv("http_proxy", "socks9://nobody")
    with pytest.raises(ConfigurationError, match=r"^environment: a proxy: .*socks9"):
        HttpBatchClient("http://batches.example:8001")


def test_waiting_passes_over_a_server_that_is_started_again() -> None:
    answers = iter(["in_progress", None, 500, 502, 503, 504, None, "completed"])

    def server(request: httpx.Request) -> httpx.Response:
        status = next(answers)
        if status is None:
            raise httpx.ConnectError("refused")
        if isinstance(status, int):  # a proxy's, or its database's
            return httpx.Response(status)
        return httpx.Response(200, json=told(status, 4))

    with client_of(server) as client:
        ended = batch.wait_for(client, client.state("b"), lambda pause_s: None)
    assert ended.status == "completed"


def test_waiting_passes_over_the_same_by_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """CANCELLED is what a call ends with that met the end of its server."""
    code = grpc.StatusCode
    codes = [code.UNAVAILABLE, code.CANCELLED, code.DEADLINE_EXCEEDED, code.INTERNAL, code.UNKNOWN]
    failures = iter([*codes, code.NOT_FOUND])

    def state(batch_id: str) -> BatchState:
        raise remote_error(next(failures), "", "it failed")

    client = GrpcBatchClient("grpc://there:1", "there:1")
    monkeypatch.setattr(client._client, "state", state)
    running = BatchState("b", "in_progress", 4, 0, 0, None, None, ())
    with pytest.raises(BatchError, match="it failed"):
        batch.wait_for(client, running, lambda pause_s: None)
    assert next(failures, None) is None, "all were passed over but the last, which is for good"


def test_a_server_that_was_away_and_came_back_may_be_away_again() -> None:
    """Each time for less than patience lasts."""
    paused_s, states = 0.0, [told("in_progress", done) for done in range(4)]

    def sleep(pause_s: float) -> None:
        nonlocal paused_s
        paused_s += pause_s

    def server(request: httpx.Request) -> httpx.Response:
        nonlocal paused_s
        if paused_s < 200 and len(states) < 4:
            raise httpx.ConnectError("refused")
        paused_s = 0.0
        return httpx.Response(200, json=states.pop(0) if states else told("completed", 4))

    with client_of(server) as client:
        assert batch.wait_for(client, client.state("b"), sleep).status == "completed"


def test_waiting_ends_where_the_server_stays_away_or_refuses() -> None:
    pauses: list[float] = []

    def away(request: httpx.Request) -> httpx.Response:
        if pauses:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, json=told("in_progress"))

    with client_of(away) as client, pytest.raises(BatchError, match="refused"):
        batch.wait_for(client, client.state("b"), pauses.append)
    assert 300 <= sum(pauses) < 320
    answers = iter([httpx.Response(200, json=told("in_progress")), httpx.Response(404)])
    pauses.clear()
    with client_of(lambda request: next(answers)) as client, pytest.raises(BatchError, match="404"):
        batch.wait_for(client, client.state("b"), pauses.append)
    assert len(pauses) == 1


def test_patience_is_with_a_server_that_says_nothing_too() -> None:
    """Each question to it lasts until it times out: an hour, were these not counted."""
    now_s = 0.0

    def sleep(pause_s: float) -> None:
        nonlocal now_s
        now_s += pause_s

    def stopped(request: httpx.Request) -> httpx.Response:
        nonlocal now_s
        now_s += 60
        raise httpx.ReadTimeout("timed out")

    running = BatchState("b", "in_progress", 4, 0, 0, None, None, ())
    with client_of(stopped) as client, pytest.raises(BatchError, match="timed out"):
        batch.wait_for(client, running, sleep, lambda: now_s)
    assert 300 < now_s <= 300 + 60 + 5


@pytest.mark.parametrize(
    "url",
    [
        "http://a:port",
        "there:8001",
        "ftp://there",
        "grpc://there",
        "grpc://there:1/path",
        "grpcs://user@there:1",
        "grpc://a:port",
        "https://user:secret@there",
        "http://10.0..1:8001",
        "https://" + "h" * 64,
    ],
)
def test_a_url_that_is_none_is_one_line(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^--url: [^\n]+$") as caught:
        batch.run(["status", "b", "--url", url])
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("scheme", ["http", "grpc"])
@pytest.mark.parametrize("content", ["\n", "dk-secret\ndk-other\n", "dk-sécret"])
def test_a_file_without_one_key_is_refused_and_nothing_of_it_said(
    tmp_path: Path, scheme: str, content: str
) -> None:
    """What speaks HTTP would refuse such a header by quoting it."""
    path = tmp_path / "key"
    path.write_text(content, encoding="utf-8")
    url = f"{scheme}://127.0.0.1:1"
    with pytest.raises(ConfigurationError, match=r"--api-key-file: .*expected one key") as caught:
        batch.run(["status", "b", "--url", url, "--api-key-file", str(path)])
    assert "dk-" not in caught.value.message


@pytest.mark.parametrize("url", ["http://there:1", "grpc://there:1"])
def test_a_certificates_name_where_there_is_none_is_one_line(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^--server-name: [^\n]+$"):
        batch.run(["status", "b", "--url", url, "--server-name", "batch.example"])


@pytest.mark.parametrize("scheme", ["http", "grpc"])
@pytest.mark.parametrize("command", ["submit", "status", "results", "cancel"])
def test_where_no_server_is_the_address_the_setting_and_the_fix_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], scheme: str, command: str
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"{}\n")
    with socket.socket() as taken:  # that nobody listens on
        taken.bind(("127.0.0.1", 0))
        url = f"{scheme}://127.0.0.1:{taken.getsockname()[1]}"
        assert batch.run([command, str(path), "--url", url]) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    for said in (url, "refused", "--url", "diptych batch-server", "diptych up --batch-port 8001"):
        assert said in told


def test_a_certificates_name_goes_with_every_request() -> None:
    names: list[str] = []

    def server(request: httpx.Request) -> httpx.Response:
        names.append(request.extensions["sni_hostname"])
        return httpx.Response(200, json=told("completed"))

    transport = httpx.MockTransport(server)
    with HttpBatchClient("https://there", "key", None, "batch.example", transport) as client:
        client.state("b")
        client.cancel("b")
        assert b"".join(client.content("file-x"))
    assert names == ["batch.example"] * 3


def test_an_id_that_no_url_can_have_is_one_line() -> None:
    with client_of(lambda request: httpx.Response(200)) as client, pytest.raises(BatchError):
        client.state("b\n")


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert batch.run([]) == 2
    assert batch.run(["--help"]) == 0
    assert "diptych batch submit FILE" in capsys.readouterr().out


@pytest.mark.parametrize("is_full", [True, False])
def test_results_that_nobody_takes_are_no_traceback(is_full: bool) -> None:
    """As ``| head`` leaves them; or where the disk is full."""
    program = (
        "from diptych.cli import batch\n"
        "class Server:\n"
        "    def __enter__(self): return self\n"
        "    def __exit__(self, *error): pass\n"
        "    def state(self, name):\n"
        "        from diptych.client.batches import BatchState\n"
        "        return BatchState(name, 'completed', 1, 1, 0, 'f', None, ())\n"
        "    def content(self, name): yield from [b'x' * 100_000] * 100\n"
        "batch.HttpBatchClient = lambda *asked: Server()\n"
        "raise SystemExit(batch.run(['results', 'b']))\n"
    )
    command = [sys.executable, "-c", program]
    if is_full:
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
        assert b"cannot be written: No space left" in done.stderr
    else:
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
        os.close(writer)
        assert done.stderr == b""
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr

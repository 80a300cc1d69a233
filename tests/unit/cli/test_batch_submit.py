"""``diptych batch submit`` beside a server that is a function."""

import json
import os
from pathlib import Path

import httpx
import pytest

from diptych.cli import batch
from diptych.cli.batch_client import BatchError
from diptych.cli.batch_over_http import HttpBatchClient
from diptych.errors import ConfigurationError
from tests.unit.cli.asked_server import by, told


def test_a_file_is_uploaded_and_its_batch_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[httpx.Request] = []

    def server(request: httpx.Request) -> httpx.Response:
        request.read()
        asked.append(request)
        is_file = request.url.path == "/v1/files"
        return httpx.Response(200, json={"id": "file-x"} if is_file else told("validating"))

    path = tmp_path / os.fsdecode(b"in-\xe9.jsonl")  # of a system before UTF-8
    path.write_bytes(b'{"custom_id": "a"}\n')
    by(monkeypatch, server)
    assert batch.run(["submit", str(path), "--completion-window", "7d"]) == 0
    file, made = asked
    assert b'filename="in-?.jsonl"' in file.content
    assert b'{"custom_id": "a"}\n' in file.content
    assert file.headers["authorization"] == "Bearer key"
    assert json.loads(made.content) == {
        "input_file_id": "file-x",
        "endpoint": "/v1/chat/completions",
        "completion_window": "7d",
    }
    assert capsys.readouterr().out == "b\n"


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_what_is_no_regular_file_is_one_line(tmp_path: Path, scheme: str) -> None:
    """As ``<(generate)`` is none: how large it is has to be known first."""
    reader, writer = os.pipe()
    try:
        for path in (f"/dev/fd/{reader}", str(tmp_path)):
            with pytest.raises(ConfigurationError, match=r"--file: .*expected a regular file"):
                batch.run(["submit", path, "--url", f"{scheme}://127.0.0.1:1"])
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_file_that_cannot_be_looked_for_is_one_line(scheme: str) -> None:
    """As in a folder that is not to be looked into."""
    with pytest.raises(ConfigurationError, match=r"^--file: x+: File name too long$"):
        batch.run(["submit", "x" * 300, "--url", f"{scheme}://127.0.0.1:1"])


@pytest.mark.parametrize("status", [400, 429, 507])
def test_the_upload_of_a_batch_that_is_refused_is_deleted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: int,
) -> None:
    asked: list[tuple[str, str]] = []

    def server(request: httpx.Request) -> httpx.Response:
        request.read()
        asked.append((request.method, request.url.path))
        if request.url.path == "/v1/batches":
            return httpx.Response(status, json={"error": {"message": "32 have not ended yet"}})
        return httpx.Response(200, json={"id": "file-x"})

    path = tmp_path / "in.jsonl"
    path.write_bytes(b"{}\n")
    by(monkeypatch, server)
    assert batch.run(["submit", str(path)]) == 1
    assert asked[2:] == [("DELETE", "/v1/files/file-x")]
    assert capsys.readouterr().err == "diptych batch: 32 have not ended yet\n"


@pytest.mark.parametrize("status", [500, 502, 504])
def test_the_input_of_a_batch_that_may_have_been_made_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    asked: list[str] = []

    def server(request: httpx.Request) -> httpx.Response:
        request.read()
        asked.append(request.method)
        is_file = request.url.path == "/v1/files"
        return httpx.Response(200 if is_file else status, json={"id": "file-x"})

    path = tmp_path / "in.jsonl"
    path.write_bytes(b"{}\n")
    by(monkeypatch, server)
    assert batch.run(["submit", str(path)]) == 1
    assert asked == ["POST", "POST"]


@pytest.mark.parametrize("num_bytes", [1, 10])
def test_a_file_that_is_written_to_while_it_is_uploaded_is_one_line(
    tmp_path: Path, num_bytes: int
) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b"{}\n")

    class Slow(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            path.write_bytes(b"x" * num_bytes)
            request.read()
            return httpx.Response(200, json={"id": "file-1"})

    with (
        HttpBatchClient("http://there", transport=Slow()) as client,
        pytest.raises(BatchError, match="was written to while it was read"),
    ):
        client.submit(path, "/v1/chat/completions", "24h")

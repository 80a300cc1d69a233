"""What a command says went wrong: words of a model's template, of a file, of whoever wrote them."""

from typing import Any

import grpc
import httpx
import pytest

from diptych.cli import admin, batch, chat, generate
from diptych.cli.batch_over_http import HttpBatchClient
from diptych.cli.connection import say_retry
from diptych.errors import DiptychError, InvalidRequestError

WORDS = "a\x1b]0;own\x07\n\x9b31mb"
SHOWN = r"a\u001b]0;own\u0007 \u009b31mb"


@pytest.mark.parametrize("command", [chat, generate], ids=["chat", "generate"])
def test_no_terminal_obeys_why_a_request_is_refused(
    command: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def refuse(*_: object) -> None:
        raise InvalidRequestError(WORDS, field="chat.messages")

    monkeypatch.setattr(command, "_open" if command is chat else "_generate", refuse)
    assert command.run([] if command is chat else ["Hello"]) == 1
    assert capsys.readouterr().err.endswith(f"REQUEST_INVALID: chat.messages: {SHOWN}\n")


def test_nor_why_a_worker_keeps_its_roles(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def refuse(*_: object) -> None:
        no_metadata = grpc.aio.Metadata()
        code = grpc.StatusCode.INTERNAL
        raise grpc.aio.AioRpcError(code, no_metadata, no_metadata, WORDS, "")

    monkeypatch.setattr(admin, "_set_roles", refuse)
    assert admin.run(["roles", "127.0.0.1:1", "--roles", "decode"]) == 1
    assert SHOWN in capsys.readouterr().err


def test_nor_why_it_is_asked_again(capsys: pytest.CaptureFixture[str]) -> None:
    say_retry(DiptychError(WORDS), 1.0)
    assert capsys.readouterr().err == f"diptych: INTERNAL: {SHOWN}; asking again in 1.0 s\n"


def test_nor_what_is_wrong_with_a_batch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its lines may be others'."""
    counts = {"total": 0, "completed": 0, "failed": 0}
    ids = {"id": "b", "output_file_id": None, "error_file_id": None}
    failed = {"status": "failed", "request_counts": counts, **ids}
    told = [
        httpx.Response(200, json={**failed, "errors": {"data": [{"message": WORDS}]}}),
        httpx.Response(404, json={"error": {"message": WORDS}}),
    ]
    server = httpx.MockTransport(lambda request: told.pop(0))
    monkeypatch.setattr(
        batch, "HttpBatchClient", lambda url, *_: HttpBatchClient(url, transport=server)
    )
    assert batch.run(["status", "b"]) == batch.run(["status", "b"]) == 1
    assert capsys.readouterr().err.splitlines()[1:] == [SHOWN, f"diptych batch: {SHOWN}"]

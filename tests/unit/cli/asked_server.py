"""A batch server that is a function, for the commands of ``diptych batch``."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from diptych.cli import batch
from diptych.cli.batch_over_http import HttpBatchClient

Server = Callable[[httpx.Request], httpx.Response]


def told(status: str, completed: int = 0, failed: int = 0, **more: object) -> dict[str, Any]:
    counts = {"total": 4, "completed": completed, "failed": failed}
    ids = {"output_file_id": None, "error_file_id": None}
    return {"id": "b", "status": status, "request_counts": counts, "errors": None, **ids, **more}


def client_of(server: Server) -> HttpBatchClient:
    return HttpBatchClient("http://there", "key", transport=httpx.MockTransport(server))


def by(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    """Commands ask that server."""
    monkeypatch.setattr(batch, "HttpBatchClient", lambda url, key, ca, name: client_of(server))

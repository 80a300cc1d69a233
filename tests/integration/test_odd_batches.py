"""Whatever the batch server is sent, it answers with a type, and files stay as they were.

Ten thousand requests with ``--hypothesis-profile long``.
"""

import logging
import random
from collections import Counter
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from hypothesis import settings

from tests.integration.odd_bodies import ODD_VALUES, OddBody, odd_body
from tests.notes import Note
from tests.unit.batch_server.http_rig import BOUNDS, asked, upload
from tests.unit.batch_server.rig import CHAT, line, opened

IS_LONG = settings.get_current_profile_name() == "long"
NUM_REQUESTS = 10_000 if IS_LONG else 120
NEIGHBOUR_EACH = 20
DATA = line("a", "one") + line("b", "two")
REFUSALS: Final = {400, 403, 404, 405, 409, 413, 415, 429}
OURS: Final = ("router", "diptych", "batch_server")  # loggers: what crashes is told of there
ODD_TEXTS: Final = [value for value in ODD_VALUES if isinstance(value, str) and len(value) < 100]


# A part that was cut off Starlette leaves to be closed where it is let go.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_every_request_gets_a_typed_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, note: Note
) -> None:
    seen: Counter[int] = Counter()
    bounds = BOUNDS._replace(max_tenant_bytes=10_000_000)
    async with opened(tmp_path) as rig, asked(rig, bounds=bounds) as client:
        kept = await upload(client, DATA)
        with caplog.at_level(logging.ERROR):
            for turn in range(NUM_REQUESTS):
                rng = random.Random(turn)
                request = rng.choice((odd_batch, odd_batch, odd_upload, odd_look))(
                    rng, client, kept
                )
                answer = await client.send(request)
                check(answer, f"request {turn}: {request.method} {request.url}")
                seen[answer.status_code] += 1
                if turn % NEIGHBOUR_EACH == 0:
                    content = await client.get(f"/v1/files/{kept}/content")
                    assert content.content == DATA
    ours = [each for each in caplog.records if each.name.startswith(OURS)]
    assert not ours, [vars(record) for record in ours]
    note(f"{seen.total()} requests to the batch server: {dict(sorted(seen.items()))}")
    assert seen[200] > NUM_REQUESTS // 20
    assert seen[400] > NUM_REQUESTS // 5


def odd_batch(rng: random.Random, client: httpx.AsyncClient, kept: str) -> httpx.Request:
    """A body for a batch."""
    good = {
        "input_file_id": kept,
        "endpoint": CHAT,
        "completion_window": "24h",
        "metadata": {"a": "b"},
    }
    odd: OddBody = odd_body(rng, good)
    return client.build_request("POST", "/v1/batches", content=odd.data, headers=odd.headers)


def odd_upload(rng: random.Random, client: httpx.AsyncClient, kept: str) -> httpx.Request:
    """A form, whose bytes may be cut or changed."""
    names = ["in.jsonl", "", "x" * 300, "\u2028.jsonl", "../a", "a\x00b"]
    parts = {rng.choice(["file", "file", "other", ""]): (rng.choice(names), rng.randbytes(50))}
    fields: dict[str, Any] = {rng.choice(["purpose", "a"]): rng.choice(["batch", "batch", "", "x"])}
    made = client.build_request("POST", "/v1/files", files=parts, data=fields)
    data = bytearray(made.read())
    if rng.random() < 0.5:
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        del data[rng.choice([len(data), rng.randrange(len(data))]) :]
    headers = {"content-type": made.headers["content-type"]}
    if rng.random() < 0.1:
        headers["content-type"] = rng.choice(["multipart/form-data", "text/plain", ""])
    return client.build_request("POST", "/v1/files", content=bytes(data), headers=headers)


def odd_look(rng: random.Random, client: httpx.AsyncClient, kept: str) -> httpx.Request:
    """What only reads, or would end or delete what is not there."""
    text = rng.choice([*ODD_TEXTS, "file-0", "batch_0"]).encode(errors="replace").decode()
    path = rng.choice(["/v1/files", "/v1/batches", f"/v1/files/{kept}", "/v1/files/x", "/v1/x"])
    if rng.random() < 0.3:
        path = rng.choice(["/v1/batches/x/cancel", "/v1/files/x/content", "/health", "/"])
    names = rng.choices(["limit", "after", "order", "purpose", "unknown"], k=2)
    method = rng.choice(["GET", "GET", "POST", "PUT", "DELETE"]) if kept not in path else "GET"
    return client.build_request(method, path, params=dict.fromkeys(names, text))


def check(answer: httpx.Response, what: str) -> None:
    """It is an answer, or a refusal with a type."""
    said = f"{what}: {answer.status_code} {answer.text[:500]}"
    if answer.status_code == 200:
        return
    assert answer.status_code in REFUSALS, said
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}, said
    assert error["param"] or answer.status_code != 400, said

"""A model is fetched from a hub by its real client; the hub is a server of this test."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

SHA = "0123456789abcdef0123456789abcdef01234567"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
SHARD_BYTES = 24 * 2**20  # the client tells of each 10 MiB
INDEX = {
    "metadata": {"total_size": 2 * SHARD_BYTES},
    "weight_map": {"a": SHARDS[0], "b": SHARDS[1]},
}
FILES: Mapping[str, bytes] = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    **{name: os.urandom(SHARD_BYTES) for name in SHARDS},
    "pytorch_model.bin": b"another format of the same",
    "original/consolidated.pth": b"and another",
    "onnx/config.json": b"of that",
    "1_Pooling/config.json": b'{"pooling_mode_lasttoken": true}',
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
}
USED = (
    "config.json",
    "tokenizer.json",
    "model.safetensors.index.json",
    "1_Pooling/config.json",
    "additional_chat_templates/tool_use.jinja",
    *SHARDS,
)
TEXTS = tuple(name for name in USED if name not in SHARDS)
FETCH = """
import sys, threading
from pathlib import Path
from diptych.models.source import resolve
from diptych.progress import AbandonedError, abandonable

abandoned = threading.Event()
seen = []

def note(stage, done_ratio):
    seen.append(done_ratio)
    if {stops!r} and done_ratio > 0:
        abandoned.set()

try:
    report = abandonable(note, abandoned)
    print(resolve("org/name", Path(sys.argv[1]), report, texts_only={texts_only!r}).folder)
except AbandonedError:
    print("abandoned")
print(sorted(set(seen)))
"""


class Hub(BaseHTTPRequestHandler):
    """What the client asks of one: a revision, its files, and each of them."""

    asked: list[str]
    goes_on: threading.Event  # before that half of a shard is sent

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def log_message(self, format: str, *args: Any) -> None: ...

    def _answer(self, *, has_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        found = path.removeprefix(f"/org/name/resolve/{SHA}/")
        if path.startswith("/api/models/org/name/tree/"):
            self._send(has_body, json.dumps(list(map(_entry, FILES))).encode(), {})
        elif path.startswith("/api/models/org/name"):
            siblings = [{"rfilename": name} for name in FILES]
            told = {"id": "org/name", "sha": SHA, "siblings": siblings}
            self._send(has_body, json.dumps(told).encode(), {})
        elif found in FILES:
            if has_body:
                self.asked.append(found)
            etag = hashlib.sha256(FILES[found]).hexdigest()
            self._send(has_body, FILES[found], {"ETag": f'"{etag}"', "X-Repo-Commit": SHA})
        else:
            self.send_error(404)

    def _send(self, has_body: bool, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if not has_body:
            return
        half = len(body) // 2 if len(body) >= SHARD_BYTES else len(body)
        self.wfile.write(body[:half])
        self.wfile.flush()
        if half < len(body):
            self.goes_on.wait(60)
        with suppress(OSError):  # the client has left
            self.wfile.write(body[half:])


def _entry(name: str) -> Mapping[str, object]:
    digest = hashlib.sha256(FILES[name]).hexdigest()
    entry: dict[str, object] = {"type": "file", "path": name, "size": len(FILES[name])}
    return entry | {"oid": digest[:40]}


@contextmanager
def hub(*, holds_back: bool) -> Iterator[tuple[str, list[str]]]:
    """Its address, and the files that were asked for."""
    goes_on = threading.Event()
    if not holds_back:
        goes_on.set()
    handler = type("Handler", (Hub,), {"asked": [], "goes_on": goes_on})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler.asked  # type: ignore[attr-defined]
    finally:
        goes_on.set()
        server.shutdown()
        serving.join()
        server.server_close()


def fetch(
    address: str, cache: Path, *, stops: bool = False, texts_only: bool = False
) -> tuple[str, list[float]]:
    """What a process of its own says that it fetched, and how far it told it was."""
    environment = {**os.environ, "HF_ENDPOINT": address, "HF_HUB_DISABLE_XET": "1"}
    environment |= {"HF_HOME": str(cache / "home"), "HF_HUB_DOWNLOAD_TIMEOUT": "5"}
    environment |= {"TQDM_DISABLE": "1"}  # nobody wants bars, and progress is told all the same
    script = FETCH.format(stops=stops, texts_only=texts_only)
    command = [sys.executable, "-c", script, str(cache)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    folder, seen = done.stdout.splitlines()
    return folder, json.loads(seen)


def test_the_files_that_are_used_are_fetched_with_progress(tmp_path: Path) -> None:
    with hub(holds_back=False) as (address, asked):
        folder, seen = fetch(address, tmp_path, stops=False)
        for name in USED:
            assert (Path(folder) / name).read_bytes() == FILES[name]
        assert sorted(asked) == sorted(USED), "each once, and nothing of other formats"
        assert seen[0] == 0.0
        assert any(0.2 < each < 0.9 for each in seen)
        assert seen[-1] == 1.0
        assert fetch(address, tmp_path, stops=False)[0] == folder
        assert sorted(asked) == sorted(USED), "nothing again"


def test_the_weights_come_into_the_folder_that_has_the_texts(tmp_path: Path) -> None:
    """A router may have been there before the first worker."""
    with hub(holds_back=False) as (address, asked):
        folder, seen = fetch(address, tmp_path, texts_only=True)
        assert sorted(asked) == sorted(TEXTS)
        assert seen == [0.0, 1.0]
        assert fetch(address, tmp_path)[0] == folder
        assert sorted(asked) == sorted(USED), "the texts not again"
        for name in USED:
            assert (Path(folder) / name).read_bytes() == FILES[name]
        assert fetch(address, tmp_path, texts_only=True)[0] == folder
    assert sorted(asked) == sorted(USED), "nothing again"


@pytest.mark.timeout(100)
def test_who_is_told_to_stop_amid_a_download_stops(tmp_path: Path) -> None:
    with hub(holds_back=True) as (address, _):
        assert fetch(address, tmp_path, stops=True)[0] == "abandoned"

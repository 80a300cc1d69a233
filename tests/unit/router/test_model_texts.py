"""A router fetches what it reads of a model on the hub, and no weights."""

import fnmatch
import json
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from diptych.models.source import resolve
from diptych.text.identity import text_digest
from router.app import _load_model
from router.config import RouterConfig
from router.frontend.served_model import ServedModel
from tests.tiny_model import write_tiny_model

MODEL = "meta-llama/Llama-3.3-70B-Instruct"
SHARDS = [f"model-{number:05}-of-00030.safetensors" for number in range(1, 31)]
TEXTS = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors.index.json",
    "1_Pooling/config.json",
    "additional_chat_templates/tool_use.jinja",
}
Snapshot = Callable[[], set[str]]


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Snapshot:
    """Says which files of the model were fetched; the hub is a folder of this test."""
    import huggingface_hub

    remote, snapshot = write_tiny_model(tmp_path / "remote"), tmp_path / "0123abcd"
    (remote / "model.safetensors").unlink()
    weight_map = {f"layer {number}": shard for number, shard in enumerate(SHARDS)}
    index = {"metadata": {"total_size": 141 * 10**9}, "weight_map": weight_map}
    contents = dict.fromkeys(SHARDS, "") | {
        "model.safetensors.index.json": json.dumps(index),
        "1_Pooling/config.json": '{"pooling_mode_lasttoken": true}',
        "additional_chat_templates/tool_use.jinja": "{{ messages }}",
    }
    for name, content in contents.items():
        (remote / name).parent.mkdir(exist_ok=True)
        (remote / name).write_text(content)

    def files(folder: Path) -> set[str]:
        return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}

    def fetch(
        name: str,
        *,
        allow_patterns: Sequence[str],
        ignore_patterns: Sequence[str] = (),
        **_: object,
    ) -> str:
        assert name == MODEL
        for file in files(remote):
            allowed = any(fnmatch.fnmatch(file, pattern) for pattern in allow_patterns)
            if allowed and not any(fnmatch.fnmatch(file, pattern) for pattern in ignore_patterns):
                (snapshot / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(remote / file, snapshot / file)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    return lambda: files(snapshot)


def load(tmp_path: Path) -> ServedModel:
    config = RouterConfig(model=MODEL, decode=["127.0.0.1:1"], cache_dir=tmp_path / "cache")
    return _load_model(config, threading.Event())


def test_a_router_fetches_no_weights(tmp_path: Path, fetched: Snapshot) -> None:
    model = load(tmp_path)
    assert fetched() == TEXTS
    assert model.name == MODEL
    assert model.pooling is not None


def test_a_worker_fetches_the_weights_beside_a_routers_texts(
    tmp_path: Path, fetched: Snapshot
) -> None:
    """In one cache, where a router may come first; and both mean the same by a token id."""
    model = load(tmp_path)
    folder = resolve(MODEL, tmp_path / "cache").folder
    assert fetched() == TEXTS | set(SHARDS)
    assert model.tokenizer.digest == text_digest(folder) != ""

"""How long a sequence may be is the same to a router and to the engine."""

import json
from pathlib import Path
from typing import Any

import pytest

from diptych.engine.model.config import ModelConfig
from diptych.errors import ConfigurationError
from diptych.text.context_length import context_length
from diptych.text.tokenizer import Tokenizer
from tests.tiny_model import write_tiny_model

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}
ROPE = {"rope_theta": 10_000.0}


@pytest.mark.parametrize(
    ("family", "said", "length"),
    [
        ("llama", {}, 640),
        ("qwen3", {"rope_scaling": YARN}, 1024),
        ("qwen3", {"rope_scaling": YARN | {"factor": 2.0}}, 640),
        ("qwen3", {"rope_scaling": YARN | {"factor": None}}, 640),
        ("qwen3", {"rope_parameters": YARN | ROPE}, 1024),
        ("qwen3", {"rope_scaling": YARN, "original_max_position_embeddings": 512}, 2048),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 2}}, 1280),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 640),
        (
            "gemma3",
            {"rope_parameters": {"full_attention": YARN | ROPE, "sliding_attention": ROPE}},
            1024,
        ),
    ],
)
def test_a_config_says_one_length_on_both_sides(
    tmp_path: Path, family: str, said: dict[str, Any], length: int
) -> None:
    write_tiny_model(tmp_path, family)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | said))
    assert ModelConfig.from_folder(tmp_path).max_position == length
    assert Tokenizer.from_folder(tmp_path).max_model_len == length


@pytest.mark.parametrize(("family", "length"), [("gemma2", 8192), ("gemma3", 131_072)])
@pytest.mark.parametrize("said", [{}, {"max_position_embeddings": None, "vocab_size": None}])
def test_a_silent_config_is_taken_alike_on_both_sides(
    tmp_path: Path, family: str, length: int, said: dict[str, Any]
) -> None:
    write_tiny_model(tmp_path, family)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    del content["max_position_embeddings"], content["vocab_size"]
    path.write_text(json.dumps(content | said))
    config, tokenizer = ModelConfig.from_folder(tmp_path), Tokenizer.from_folder(tmp_path)
    assert config.max_position == tokenizer.max_model_len == length
    assert config.vocab_size == tokenizer.vocab_size > 200_000


@pytest.mark.parametrize(
    "said",
    [
        {"rope_scaling": YARN | {"factor": "4"}},
        {"rope_scaling": YARN | {"factor": 1e300}},
        {"rope_scaling": YARN | {"factor": float("nan")}},
        {"rope_scaling": YARN | {"original_max_position_embeddings": [256]}},
        {"rope_scaling": [YARN]},
        {"rope_parameters": "yarn"},
    ],
)
def test_what_is_no_length_is_named(said: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"config\.json: "):
        context_length(said, 640)

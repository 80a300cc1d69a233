"""When a router and a worker mean the same by a token id."""

import json
from pathlib import Path

import pytest

from diptych.errors import ConfigurationError
from diptych.text.identity import text_digest

CONFIG: dict[str, object] = {"vocab_size": 512, "eos_token_id": 2}


def folder(path: Path, config: dict[str, object] = CONFIG, tokenizer: str = "{}") -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text(tokenizer)
    return path


def test_provenance_and_order_of_keys_do_not_matter(tmp_path: Path) -> None:
    here = folder(tmp_path / "here")
    there = dict(reversed(CONFIG.items())) | {"transformers_version": "5", "_name_or_path": "x"}
    assert text_digest(here) == text_digest(folder(tmp_path / "there", there))


def test_another_tokenizer_or_config_does(tmp_path: Path) -> None:
    folders = (
        folder(tmp_path / "a"),
        folder(tmp_path / "b", tokenizer='{"model": 1}'),
        folder(tmp_path / "c", CONFIG | {"vocab_size": 513}),
    )
    assert len({text_digest(each) for each in folders}) == 3


def test_no_tokenizer_is_no_claim_and_no_config_an_error(tmp_path: Path) -> None:
    here = folder(tmp_path / "here")
    (here / "config.json").unlink()
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        text_digest(here)
    (here / "tokenizer.json").unlink()
    assert text_digest(here) == ""


def test_a_config_nested_too_deep_is_named(tmp_path: Path) -> None:
    here = folder(tmp_path / "here")
    (here / "config.json").write_text('{"auto_map": ' + "[" * 10_000 + "]" * 10_000 + "}")
    with pytest.raises(ConfigurationError, match=r"config\.json: nested too deep"):
        text_digest(here)


@pytest.mark.parametrize("content", ["[]", "null", "7"])
def test_a_config_that_is_no_object_is_named(tmp_path: Path, content: str) -> None:
    here = folder(tmp_path / "here")
    (here / "config.json").write_text(content)
    with pytest.raises(ConfigurationError, match=r"config\.json is not a JSON object"):
        text_digest(here)

"""A worker holds outputs to constraints, or knows why it cannot."""

from pathlib import Path

from diptych.text.grammars import NO_TOKENIZER, Grammars, NoGrammars
from diptych.worker import loading
from tests.text_models import byte_level_tokenizer


def test_a_worker_without_grammars_knows_why(tmp_path: Path) -> None:
    assert loading._load_grammars(tmp_path, 9) == NO_TOKENIZER
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    found = loading._load_grammars(tmp_path, 9)
    assert isinstance(found, NoGrammars)
    assert "tokenizer.json: " in found.reason
    assert "Model missing" in found.reason
    assert str(tmp_path) not in found.reason, "clients read it"
    byte_level_tokenizer().save(str(path))
    assert isinstance(loading._load_grammars(tmp_path, 9), Grammars), "with tokens beyond its own"

"""What ``diptych up`` says at its end."""

import json
import shlex
from pathlib import Path

import pytest

from diptych.cli.up import lines_to_paste, own_command
from diptych.v1.inference_pb2 import Model


def test_a_model_that_chats_is_chatted_with() -> None:
    model = Model(name="it's", has_chat_template=True)
    chat, curl, page = map(shlex.split, lines_to_paste("diptych", "h:1", "h:2", model))
    assert chat == ["diptych", "chat", "--address", "h:1"]
    assert page == ["http://h:2/"]
    assert curl[1] == "http://h:2/v1/chat/completions"
    assert json.loads(curl[-1])["model"] == "it's"
    assert "messages" in json.loads(curl[-1])


def test_one_that_does_not_continues_a_text() -> None:
    generate, curl, page = map(
        shlex.split, lines_to_paste("diptych", "h:1", "h:2", Model(name="m"))
    )
    assert generate == ["diptych", "generate", "--address", "h:1", "Hello!"]
    assert page == ["http://h:2/"]
    assert curl[1] == "http://h:2/v1/completions"
    assert json.loads(curl[-1])["prompt"] == "Hello!"


def test_without_http_there_is_no_curl() -> None:
    (generate,) = lines_to_paste(".venv/bin/diptych", "h:1", "", Model(name="m"))
    assert generate.startswith(".venv/bin/diptych generate")


def test_the_command_is_named_so_that_a_shell_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def called(by: Path, path: Path) -> str:
        monkeypatch.setattr("sys.argv", [str(by)])
        monkeypatch.setenv("PATH", str(path))
        return own_command()

    here, elsewhere = (tmp_path / name / "diptych" for name in ("my tools", "others"))
    for each in (here, elsewhere):
        each.parent.mkdir()
        each.touch(0o755)
    assert called(here, here.parent) == "diptych"
    assert called(here, tmp_path) == called(here, elsewhere.parent) == f"'{here}'"
    assert called(tmp_path / "__main__.py", tmp_path) == "diptych"

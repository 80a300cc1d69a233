"""Where a process listens is told in a file, or a line says why not."""

import json
import re
from pathlib import Path

import pytest

from diptych.errors import ConfigurationError
from diptych.service_host import write_port_file


def test_what_is_told_is_there_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "ports.json"
    for port in (1, 2):
        write_port_file(path, {"port": port})
        assert json.loads(path.read_text()) == {"port": port}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("path", [".", "..", "/", "folder", "folder/"])
def test_a_folder_is_no_port_file(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    line = f"--port-file: {Path(path)}: is a folder: name a file in it"
    with pytest.raises(ConfigurationError, match=f"^{re.escape(line)}$"):
        write_port_file(Path(path), {})
    assert [each.name for each in tmp_path.iterdir()] == ["folder"], "nothing is left"


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("gone/ports.json", "No such file or directory"),
        ("file/ports.json", "Not a directory"),
        ("n" * 250, "File name too long"),  # with what it has until it is whole
        ("n" * 256, "File name too long"),
    ],
)
def test_a_place_that_cannot_be_written_is_named(path: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    whole = tmp_path / path
    line = f"--port-file: {whole}: {why}: name a file that can be written"
    with pytest.raises(ConfigurationError, match=f"^{re.escape(line)}$"):
        write_port_file(whole, {})
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_half_a_file_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_up(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fill_up)
    with pytest.raises(ConfigurationError, match="No space left on device"):
        write_port_file(tmp_path / "ports.json", {})
    assert not list(tmp_path.iterdir())

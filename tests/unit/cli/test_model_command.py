"""A model that is fetched ahead of time, or imported into a folder which its user names."""

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from diptych.cli import model
from diptych.cli.main import main
from diptych.progress import Progress

Write = Callable[[Path], None]


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "a model.gguf"
    path.write_bytes(b"GGUF")
    return path


def importing(monkeypatch: pytest.MonkeyPatch, write: Write) -> None:
    """Imports do this with the folder that they get."""

    def load() -> Callable[[Path, Path, Progress], None]:
        return lambda file, folder, progress: write(folder)

    monkeypatch.setattr(model, "load_importer", load)


def test_the_folder_is_there_once_it_is_whole(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who is killed amid it leaves nothing by that name, which a worker would take for a model."""
    to = tmp_path / "new" / "my model"

    def write(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        assert not to.exists()

    importing(monkeypatch, write)
    assert main(["model", "import", str(gguf), "--to", str(to)]) == 0
    assert capsys.readouterr().out == f"{to}\n"
    assert [path.name for path in to.parent.iterdir()] == ["my model"]
    assert [path.name for path in to.iterdir()] == ["config.json"]
    assert main(["model", "import", str(gguf), "--to", str(to)]) == 2
    assert capsys.readouterr().err == f"diptych model: --to: {to} exists\n"


@pytest.mark.parametrize(
    ("failure", "code"), [(OSError(28, "No space left on device"), 2), (KeyboardInterrupt(), 130)]
)
def test_an_import_that_fails_leaves_nothing(
    gguf: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failure: BaseException,
    code: int,
) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise failure

    importing(monkeypatch, fail)
    assert main(["model", "import", str(gguf), "--to", str(tmp_path / "to")]) == code
    assert [path.name for path in tmp_path.iterdir()] == [gguf.name]
    line = f"diptych model: --to: {tmp_path / 'to'}: No space left on device\n"
    assert capsys.readouterr().err == (line if code == 2 else "")


def test_a_place_that_has_no_room_for_a_folder_is_one_line(
    gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = gguf / "to"
    assert main(["model", "import", str(gguf), "--to", str(to)]) == 2
    assert capsys.readouterr().err == f"diptych model: --to: {to}: Not a directory\n"


def test_ctrl_c_ends_what_threads_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the hub's client has several, for whose end it waits."""
    import huggingface_hub

    def fetch(*_: object, tqdm_class: Any, **__: object) -> str:
        def each() -> None:
            with tqdm_class(total=2**40, unit="B") as bar:
                while True:
                    bar.update(1)

        with ThreadPoolExecutor(1) as threads:
            threads.submit(each)
            os.kill(os.getpid(), signal.SIGINT)
            for _each in range(1000):  # a signal may reach this thread a moment later
                time.sleep(0.01)
            raise AssertionError("it was not interrupted")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    before = signal.getsignal(signal.SIGINT)
    try:
        assert main(["model", "fetch", "org/name", "--cache-dir", str(tmp_path)]) == 130
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, ours)

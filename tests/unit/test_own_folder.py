"""A folder of temporary files is there while its owner is, and not much longer."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from diptych.own_folder import OwnFolder

OWNER = (
    "import sys; from diptych.own_folder import OwnFolder\n"
    "folder = OwnFolder(sys.argv[1]); print(folder.path, flush=True); sys.stdin.read()"
)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@contextmanager
def owner(kind: str) -> Iterator[tuple["subprocess.Popen[str]", Path]]:
    """Another process and its folder."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_it_is_gone_when_it_is_closed(temporary: Path) -> None:
    with closing(OwnFolder("some")) as folder:
        assert folder.path.parent == temporary
        assert folder.path.name.startswith("diptych-some-")
        assert folder.path.stat().st_mode & 0o777 == 0o700
        (folder.path / "file").touch()
    folder.close()
    assert not list(temporary.iterdir())


def test_what_a_killed_owner_left_goes_with_the_next_of_its_kind(temporary: Path) -> None:
    with owner("some") as (lives, kept), owner("other") as (of_another_kind, other):
        with owner("some") as (killed, left):
            (left / "settings.yaml").touch()
            killed.kill()
            killed.wait()
        of_another_kind.kill()
        of_another_kind.wait()
        assert left.exists()
        with closing(OwnFolder("some")) as folder:
            assert set(temporary.iterdir()) == {kept, other, folder.path}
            with closing(OwnFolder("some")) as second:
                assert {kept, folder.path, second.path} < set(temporary.iterdir())
        lives.kill()


def test_what_is_not_ours_stays(temporary: Path) -> None:
    users = temporary / "diptych-some-results"
    elsewhere = temporary / "elsewhere"
    linked = temporary / "diptych-some-link"
    for folder in (users, elsewhere, linked):
        folder.mkdir()
    (elsewhere / "file").touch()
    (linked / ".owner").symlink_to(elsewhere / "file")
    with closing(OwnFolder("some")):
        pass
    assert set(temporary.iterdir()) == {users, elsewhere, linked}
    assert (elsewhere / "file").exists()


def test_what_another_user_left_stays(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may remove all, as root, does not."""
    with owner("some") as (killed, left):
        killed.kill()
        killed.wait()
    monkeypatch.setattr(os, "geteuid", lambda: left.stat().st_uid + 1)
    with closing(OwnFolder("some")):
        pass
    assert list(temporary.iterdir()) == [left]


def test_where_there_is_no_room_nothing_is_left(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError("no room")))
    with pytest.raises(OSError, match="no room"):
        OwnFolder("some")
    assert not list(temporary.iterdir())

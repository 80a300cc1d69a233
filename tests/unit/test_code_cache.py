"""Compiled code is never that of other sources."""

import subprocess
import sys
from pathlib import Path

import pytest

from diptych.code_cache import code_cache


def test_each_version_of_the_sources_has_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    folders = []
    for name, text in (("old", "x = 1\n"), ("new", "x = 2\n"), ("copy", "x = 1\n")):
        sources = tmp_path / name
        sources.mkdir()
        (sources / "inlined.py").write_text(text)
        folders.append(code_cache(sources))
    old, new, copy = folders
    assert old is not None
    assert old.is_dir()
    assert old.parent == tmp_path / "cache"
    assert old == copy != new


def test_no_folder_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(blocked))
    assert code_cache(tmp_path) is None


@pytest.mark.parametrize("writable", [True, False])
def test_loops_are_kept_there_and_work_without(tmp_path: Path, writable: bool) -> None:
    cache = tmp_path / "cache"
    if not writable:
        cache.write_text("")
    code = (
        "from diptych.engine.backends.cpu.kernels import slot_loop\n"
        "from pathlib import Path\n"
        "from diptych.code_cache import code_cache\n"
        "print(code_cache(Path(slot_loop.__file__).parent))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={"NUMBA_CACHE_DIR": str(cache), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    if writable:
        assert list(Path(found).rglob("*.nbc"))
    else:
        assert found == "None"

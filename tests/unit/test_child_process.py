"""What a process starts is of our own code, whatever lies in the working folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from diptych.child_process import module_command

_SCRIPT = "import sys; from diptych.cli import main; sys.exit(main())"


def test_a_role_is_not_looked_for_in_a_users_folder(tmp_path: Path) -> None:
    """As ``diptych`` is started, whose own folder is where programs are."""
    for name in ("router/__init__.py", "json.py", "queue.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit('another program')\n")
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-P", "-c", _SCRIPT, "router", "--help"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "usage: diptych router" in done.stdout


def test_who_looks_into_the_working_folder_has_its_children_do_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with ``python -m``, in a clone that is not the one that is installed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/elsewhere"])
    assert module_command("router") == [sys.executable, "-P", "-m", "router"]
    for here in (str(tmp_path), ""):
        monkeypatch.setattr(sys, "path", [here])
        assert module_command("router") == [sys.executable, "-m", "router"]

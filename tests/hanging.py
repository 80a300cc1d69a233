"""A model thread that hangs in a real process, from a moment that the test chooses."""

import os
from pathlib import Path

import pytest

_FOLDER = Path(__file__).parent / "hung_step"


def hang_later(monkeypatch: pytest.MonkeyPatch, process: str, tmp_path: Path) -> Path:
    """Let the next step of one child process hang once the returned file exists.

    ``process`` is a part of its command line. Of several that have it the first to begin a step
    hangs: ``hung_pid`` says which. Call before they start.
    """
    flag = tmp_path / "hang"
    monkeypatch.setenv("HANG_FLAG", str(flag))
    monkeypatch.setenv("HANG_PROCESS", process)
    inherited = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(_FOLDER), inherited))))
    return flag


def hung_pid(flag: Path) -> int | None:
    """The process that hangs; None if none does yet."""
    taken = next(flag.parent.glob(f"{flag.name}.*"), None)
    return None if taken is None else int(taken.suffix[1:])

"""The folder of imported models: each entry is written once, whole or not at all.

Several processes start at once with the same model; a file lock per entry lets
one of them write while the others wait. An entry appears by rename, so whoever
sees it sees all of it, and its content never changes.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from diptych.errors import ConfigurationError
from diptych.progress import Progress

# Part of every key: raise it when an import writes something else than before.
FORMAT_VERSION = 3

_WAITING = "waiting for another process to prepare the model"
_POLL_S = 0.1


def cached_folder(
    cache_dir: Path, key: str, write: Callable[[Path], None], progress: Progress
) -> Path:
    """The entry ``key``; ``write`` fills it (given an empty folder) if it is missing.

    Blocking, also while another process writes the same entry.

    Raises:
        ConfigurationError: the cache cannot be written; also what ``write`` raises.
    """
    models = cache_dir.expanduser() / "models"
    folder = models / f"{key}-v{FORMAT_VERSION}"
    try:
        if folder.is_dir():
            return folder
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f"{folder.name}.lock", progress):
            if not folder.is_dir():
                _write_entry(folder, write)
    except OSError as error:
        raise ConfigurationError(f"model cache {models}: {error}") from None
    return folder


def _write_entry(folder: Path, write: Callable[[Path], None]) -> None:
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that died
    partial.mkdir()
    try:
        write(partial)
        for path in (*partial.iterdir(), partial):
            _sync(path)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock file; the system releases it if the process dies."""
    with path.open("w") as file:
        while not _try_lock(file):
            progress(_WAITING, 0.0)  # may raise, to give up waiting
            time.sleep(_POLL_S)
        yield


def _try_lock(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

"""Folders for temporary files that somebody removes also where their owner was killed.

Who makes one removes those of its kind first that are nobody's any more. A lock tells, for
process ids are used again, and are others in another container that shares the folder of
temporary files.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_UNFINISHED = "diptych-new-"
_LOCK = ".owner"  # in each: locked while that is there. What has none is not ours to remove
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


class OwnFolder:
    """One folder, ``path``, from its making to ``close``. Any one thread."""

    def __init__(self, kind: str) -> None:
        """``kind`` is part of its name. Raises OSError."""
        prefix = f"diptych-{kind}-"
        _remove_left(prefix)
        made = Path(tempfile.mkdtemp(prefix=_UNFINISHED))
        self._lock: int | None = None
        try:
            self._lock = os.open(made / _LOCK, _FLAGS | os.O_CREAT, 0o600)
            with suppress(OSError):  # of a file system without locks: nobody else has it then
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Nobody sees it under its name before it is locked.
            self.path = made.rename(made.with_name(prefix + made.name.removeprefix(_UNFINISHED)))
        except OSError:
            self.path = made
            self.close()
            raise

    def close(self) -> None:
        """Remove it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _remove_left(prefix: str) -> None:
    """Remove folders of that kind whose owner has ended."""
    with suppress(OSError):  # it cannot be looked into; what is to be made there will tell
        for each in Path(tempfile.gettempdir()).glob(f"{prefix}*/{_LOCK}"):
            with suppress(OSError):  # another user's, in use, or gone meanwhile
                _remove_if_left(each)


def _remove_if_left(lock: Path) -> None:
    """Raises OSError: it has an owner, or cannot be removed."""
    opened = os.open(lock, _FLAGS)
    try:
        if os.fstat(opened).st_uid != os.geteuid():
            return
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(lock.parent)
    finally:
        os.close(opened)

"""The other ranks of a worker as threads of its process."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, cast

import pytest

from diptych.telemetry import logs
from diptych.worker import rank_team
from diptych.worker.rank import follow
from diptych.worker.rank_team import RankProcess


class InThread:
    """A rank's process, as a thread of this one."""

    def __init__(self, link: Connection) -> None:
        self._code: int | None = None
        self._thread = threading.Thread(target=self._run, args=(link,), daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """It ends with its link."""

    def wait(self) -> None: ...

    def ended(self) -> int | None:
        """The exit code, once it has."""
        self._thread.join()
        return self._code

    def _run(self, link: Connection) -> None:
        self._code = follow(link)


@contextmanager
def ranks_in_threads() -> Iterator[None]:
    """All that are started within end well, before the block does."""
    started: list[InThread] = []

    def start(rank: int) -> RankProcess:
        ours, theirs = socket.socketpair()
        started.append(InThread(Connection(theirs.detach())))
        return RankProcess(rank, cast(Any, started[-1]), Connection(ours.detach()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_team, "_start", start)
        patch.setattr(logs, "set_up", lambda service, level: None)
        yield
        assert [process.ended() for process in started] == [0] * len(started)

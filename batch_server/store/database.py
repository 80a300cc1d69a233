"""One database, used by one thread of one process."""

import asyncio
import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from types import TracebackType
from typing import Concatenate, Final, NoReturn, ParamSpec, Self, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.engine import URL
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry, StaticPool

from batch_server.store.tables import METADATA
from diptych.errors import (
    RETRY_LATER_S,
    ConfigurationError,
    DatabaseAwayError,
    DiskFullError,
)
from diptych.process import StuckThreadError

logger = logging.getLogger(__name__)

_NUM_FIRST_ATTEMPTS: Final = 5  # at the lock, by who starts
_PG_LOCK: Final = 0x64697074796368  # of this program among all that use the database
_PG_LIVELINESS: Final[Mapping[str, object]] = {
    "connect_timeout": 10,  # s
    "keepalives_idle": 10,  # s
    "keepalives_interval": 5,  # s
    "keepalives_count": 4,
    "tcp_user_timeout": 30_000,  # ms
}
# The same at its end, whose session holds the lock.
_PG_SETTINGS: Final = (
    "tcp_keepalives_idle = 10",
    "tcp_keepalives_interval = 5",
    "tcp_keepalives_count = 4",
    "tcp_user_timeout = 30000",
)
_RELOCK_S: Final = 60  # after a connection broke, until the server has heard of that too
_PG_DISK_FULL: Final = "53100"
_PG_READ_ONLY: Final = "25006"
# How states begin: no connection, its server ends, or it may not be written to, as a standby or a
# primary that was made read-only.
_PG_AWAY: Final = ("08", "57P", _PG_READ_ONLY)
_SQLITE_NO_ROOM: Final = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE)  # or a quota is used up
_SQLITE_HELD: Final = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)  # by somebody else
_BUSY_MS: Final = 5000
_CLOSE_S: Final = 10.0
_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
_OWNER_ONLY: Final = 0o600
_DIALECTS: Final = ("sqlite", "postgresql+psycopg")  # whose errors are told apart here
_DRIVERS: Final = {"psycopg": "postgres"}  # by module the extra that has it

P = ParamSpec("P")
T = TypeVar("T")


class Database:
    """Owns the connection, and the thread that everything happens on. An async context manager.

    What one call does is one transaction. Calls are made in the order in which they came; one
    whose caller was cancelled is made all the same, and the caller does not learn how it ended.

    Invariant: no second process has the same database open, so that no line is sent by two.
    """

    def __init__(self, url: str, *, close_s: float = _CLOSE_S, relock_s: int = _RELOCK_S) -> None:
        """``close_s``: the patience with what it is at, when it is left; then StuckThreadError.
        ``relock_s``: that with a lock that its own session of before may hold.

        Raises ConfigurationError: ``url`` names no database that could be used.
        """
        self._close_s = close_s
        self._relock_s = relock_s
        self._url: Final[URL] = _read_url(url)
        self._is_sqlite = self._url.get_backend_name() == "sqlite"
        try:
            self._engine: Final[Engine] = create_engine(
                self._url,
                poolclass=StaticPool,
                hide_parameters=True,  # what clients wrote goes into no log
                connect_args={} if self._is_sqlite else _lively(self._url),
            )
        except ModuleNotFoundError as error:
            extra = _DRIVERS.get(error.name or "")
            advice = f": pip install -e '.[{extra}]' (in Diptych's clone)" if extra else ""
            raise ConfigurationError(f"--database: no module {error.name!r}{advice}") from None
        except (ValueError, TypeError) as error:  # what is behind its ?
            raise ConfigurationError(f"--database: {error}") from None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="database")
        self._lock_file: int | None = None
        self._is_lost = asyncio.Event()
        # A second apart; the server may not have noticed yet that who had it was killed. Later
        # there was a session of our own.
        self._num_lock_attempts = _NUM_FIRST_ATTEMPTS
        set_up = _set_up_sqlite if self._is_sqlite else self._lock_postgres
        event.listen(self._engine, "connect", set_up)

    async def __aenter__(self) -> Self:
        """Raises ConfigurationError: it cannot be opened, or another process has it."""
        try:
            await self._on_thread(self._open)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._close()

    async def call(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """What ``work`` returns, once it is stored; where it raises nothing is.

        Raises DiskFullError, DatabaseAwayError.
        """
        try:
            return await self._on_thread(partial(self._transact, work, *args, **kwargs))
        except ConfigurationError:  # the connection had broken, and with it the lock
            self._is_lost.set()
            raise

    async def keep(self) -> NoReturn:
        """Until cancelled. Raises ConfigurationError: another process has the database now.

        What that one stored this one would not know of.
        """
        await self._is_lost.wait()
        raise ConfigurationError("--database: another process took it while it was out of reach")

    def _transact(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        try:
            with self._engine.begin() as connection:
                return work(connection, *args, **kwargs)
        except DBAPIError as error:
            if _is_away(error):
                why = " ".join(str(error.orig).split())
                logger.warning("the database does not answer", extra={"error": why})
                if _is_read_only(error):
                    self._leave_standby()
                reason = "the server's database does not answer: try again later"
                raise DatabaseAwayError(reason, retry_after_s=RETRY_LATER_S) from None
            if not _is_full(error):
                raise
            told = repr(self._url.difference_update_query(self._url.query))  # may have a password
            logger.error("the disk of the database is full", extra={"database": told})
            reason = "the disk of the server's database is full: its operator has to make room"
            raise DiskFullError(reason) from None

    def _leave_standby(self) -> None:
        """Drop a connection to a standby: the next one may find the primary, and its lock.

        A primary that was made read-only is the same one still: its connection stays, and with it
        the lock.
        """
        try:
            with self._engine.connect() as connection:
                if connection.execute(text("SELECT pg_is_in_recovery()")).scalar_one():
                    connection.invalidate()
        except DBAPIError as error:  # asked again at the next write, or connected anew
            why = " ".join(str(error.orig).split())
            logger.warning("unknown whether the database is a standby", extra={"error": why})

    async def _on_thread(self, work: Callable[[], T]) -> T:
        asked = partial(copy_context().run, work)  # what is logged names the request
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, asked))

    def _open(self) -> None:
        try:
            if self._is_sqlite:
                self._lock_sqlite()
            METADATA.create_all(self._engine)
        except (SQLAlchemyError, OSError) as error:
            why = " ".join(str(getattr(error, "orig", None) or error).split())
            raise ConfigurationError(f"--database: {why}") from None

    def _lock_postgres(self, connection: DBAPIConnection, entry: ConnectionPoolEntry) -> None:
        """Of the one connection; a new one takes it anew, from its own session before if need be.

        Raises ConfigurationError.
        """
        _set_up_postgres(connection)
        for _ in range(self._num_lock_attempts):
            if _has_postgres_lock(connection):
                self._num_lock_attempts = self._relock_s
                return
            time.sleep(1.0)
        raise ConfigurationError("--database: it is used by another process")

    def _lock_sqlite(self) -> None:
        path = self._url.database
        if not path or path == ":memory:" or path.startswith("file:"):
            raise ConfigurationError("--database: expected a file, as in sqlite:///batch.sqlite")
        self._lock_file = os.open(f"{os.path.realpath(path)}.lock", _FLAGS, _OWNER_ONLY)
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(f"--database: {path} is used by another process") from None
        os.close(os.open(path, _FLAGS, _OWNER_ONLY))  # before SQLite makes it for all to read

    async def _close(self) -> None:
        disposing = asyncio.get_running_loop().run_in_executor(self._thread, self._engine.dispose)
        await asyncio.wait((disposing,), timeout=self._close_s)
        if not disposing.done():
            self._thread.shutdown(wait=False)
            raise StuckThreadError("the database does not answer")
        await disposing
        await asyncio.to_thread(self._thread.shutdown)
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None


def _read_url(given: str) -> URL:
    """Raises ConfigurationError, which repeats nothing of it: there may be a password."""
    try:
        url = make_url(given)
    except (ArgumentError, ValueError):
        raise ConfigurationError("--database: is no URL of a database") from None
    if url.drivername not in _DIALECTS:
        raise ConfigurationError(f"--database: {' or '.join(_DIALECTS)}, not {url.drivername}")
    return url


def _is_full(error: DBAPIError) -> bool:
    """Whether it says that there is no room on its disk, whichever database it is of."""
    if getattr(error.orig, "sqlite_errorcode", None) in _SQLITE_NO_ROOM:
        return True
    return getattr(error.orig, "sqlstate", None) == _PG_DISK_FULL


def _is_away(error: DBAPIError) -> bool:
    """Whether it may pass by itself: somebody else holds the database, or no connection lasts."""
    code = getattr(error.orig, "sqlite_errorcode", None)
    if code is not None:
        return (code & 0xFF) in _SQLITE_HELD
    state = getattr(error.orig, "sqlstate", None)
    if state is not None:
        return str(state).startswith(_PG_AWAY)
    return error.connection_invalidated or isinstance(error, OperationalError)


def _is_read_only(error: DBAPIError) -> bool:
    """Whether PostgreSQL says that it may not be written to."""
    return getattr(error.orig, "sqlstate", None) == _PG_READ_ONLY


def _lively(url: URL) -> dict[str, object]:
    """How connections to PostgreSQL are made, but for what the URL says itself."""
    return {name: value for name, value in _PG_LIVELINESS.items() if name not in url.query}


def _set_up_sqlite(connection: DBAPIConnection, entry: ConnectionPoolEntry) -> None:
    """What was stored stays so, even if the machine ends a moment later."""
    cursor = connection.cursor()
    for setting in ("journal_mode=WAL", "synchronous=FULL", f"busy_timeout={_BUSY_MS}"):
        cursor.execute(f"PRAGMA {setting}")
    cursor.close()


def _set_up_postgres(connection: DBAPIConnection) -> None:
    """A connection that is lost without a word ends at the server's end too, soon."""
    for setting in _PG_SETTINGS:
        cursor = connection.cursor()
        try:
            cursor.execute(f"SET {setting}")
            connection.commit()
        except Exception:  # noqa: BLE001 - of the driver, which is not imported here
            logger.warning("PostgreSQL does not take a setting", extra={"setting": setting})
            connection.rollback()
        finally:
            cursor.close()


def _has_postgres_lock(connection: DBAPIConnection) -> bool:
    """Take it, or not. It is held as long as the connection."""
    cursor = connection.cursor()
    cursor.execute(f"SELECT pg_try_advisory_lock({_PG_LOCK})")
    row = cursor.fetchone()
    cursor.close()
    connection.commit()
    return bool(row and row[0])

"""A PostgreSQL server of the tests' own, where its programs are installed."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ACCOUNT = "postgres"  # it does not run as root
_PROGRAMS = sorted(Path("/usr/lib/postgresql").glob("*/bin"))


def missing() -> str:
    """Why there is none; empty: there is."""
    if not _PROGRAMS:
        return "PostgreSQL is not installed"
    if os.geteuid() == 0 and shutil.which("runuser") is None:
        return "PostgreSQL does not run as root, and there is no runuser"
    return ""


@contextmanager
def postgres() -> Iterator[str]:
    """The URL of an empty database, which ends with the block."""
    with tempfile.TemporaryDirectory(prefix="pg") as name:  # sockets' paths are short
        folder = Path(name)
        if os.geteuid() == 0:
            shutil.chown(folder, ACCOUNT)
        with _running(folder / "data", folder):
            yield f"postgresql+psycopg://{ACCOUNT}@/postgres?host={folder}"


@contextmanager
def _running(data: Path, sockets: Path) -> Iterator[None]:
    _run("initdb", "--pgdata", data, "--username", ACCOUNT, "--auth", "trust", "--no-sync")
    settings = f"-c listen_addresses= -c unix_socket_directories={sockets} -c fsync=off"
    log = data / "log"
    _run("pg_ctl", "--pgdata", data, "--wait", "--options", settings, "--log", log, "start")
    try:
        yield
    finally:
        _run("pg_ctl", "--pgdata", data, "--mode", "immediate", "--wait", "stop")


def _run(program: str, *arguments: str | Path) -> None:
    command: Sequence[str | Path] = [_PROGRAMS[-1] / program, *arguments]
    if os.geteuid() == 0:
        command = ["runuser", "--user", ACCOUNT, "--", *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr

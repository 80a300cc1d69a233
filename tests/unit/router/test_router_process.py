"""A process of a router as its parent has it, with a small program in the router's place."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import yaml

from diptych import settings
from diptych.errors import ConfigurationError
from diptych.own_folder import OwnFolder
from router.child import RouterProcess
from router.config import RouterConfig

SOON_S = 30.0
DOUBLE = """#!/bin/sh
# Called as a router: -m router --config FILE. It ends with its standard input.
%s
cp "$4" "%s"
echo "{\\"address\\": \\"h:$$\\"}" > "$4.new" && mv "$4.new" "${4%%/*}/ports.json"
exec cat
"""
PARENT = """
import asyncio, sys
from pathlib import Path
from router.child import RouterProcess
from router.config import RouterConfig

async def live():
    sys.executable = sys.argv[1]
    process = RouterProcess(RouterConfig(model="m", decode=["a:1"]), 1.0)
    await process.start()
    print((await process.listening())["address"], flush=True)
    await process.ended()

asyncio.run(live())
"""


class Double:
    """The program, in a folder where everything temporary goes too."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "double"
        self.settings = folder / "settings.yaml"
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.write("")

    def write(self, first: str) -> None:
        """``first`` is what it does first."""
        self.path.write_text(DOUBLE % (first, self.settings))
        self.path.chmod(0o700)

    def left(self) -> list[Path]:
        return list(self.temporary.iterdir())


@pytest.fixture
def double(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Double:
    made = Double(tmp_path)
    monkeypatch.setattr(sys, "executable", str(made.path))
    monkeypatch.setattr(tempfile, "tempdir", str(made.temporary))
    return made


def process(patience_s: float = SOON_S) -> RouterProcess:
    return RouterProcess(RouterConfig(model="m", decode=["a:1"]), patience_s)


async def test_it_has_a_session_of_its_own_and_ends_when_asked(double: Double) -> None:
    one = process()
    try:
        await one.start()
        assert await one.listening() == {"address": f"h:{one.pid}"}
        assert os.getsid(one.pid) == one.pid  # so a terminal's Ctrl-C is its parent's alone
        assert len(double.left()) == 1
    finally:
        await one.stop()
    assert await one.ended() == -signal.SIGTERM
    assert double.left() == []


@pytest.mark.parametrize("name", ["a\x85b", "a \u2028 b", "\x7f", "é 😀", "1e5", "on", "\\\n"])
async def test_it_has_the_settings_of_its_parent(double: Double, name: str) -> None:
    config = RouterConfig(
        model="m",
        decode=["a:1"],
        served_model_name=name,
        api_keys=Path("k\udce8y"),  # as Python has a name that is no UTF-8
        trace_slow_s=1e-5,
    )
    one = RouterProcess(config, SOON_S)
    try:
        await one.start()
        await one.listening()
    finally:
        await one.stop()
    args = ["--config", str(double.settings)]
    told = settings.load(RouterConfig, args, prog="diptych router", env_prefix="NOTHING_")
    own = {"port_file", "stop_with_stdin", "beats_to"}
    assert told.model_dump(exclude=own) == config.model_dump(exclude=own)


async def test_without_a_folder_for_temporary_files_it_is_a_wrong_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose file system cannot be written to."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    one = process()
    with pytest.raises(ConfigurationError, match=f"^--processes: .*{tmp_path}/gone"):
        await one.start()
    await one.stop()


async def test_one_that_does_not_end_when_asked_is_killed(
    double: Double, caplog: pytest.LogCaptureFixture
) -> None:
    double.write("trap '' TERM")
    one = process(patience_s=0.05)
    try:
        await one.start()
        await one.listening()
    finally:
        await one.stop()
    assert await one.ended() == -signal.SIGKILL
    assert "a process was killed: it did not drain" in caplog.messages
    assert double.left() == []


async def test_the_next_one_starts_though_the_folder_of_the_last_was_cleaned_away(
    double: Double,
) -> None:
    last, one = process(), process()
    try:
        await last.start()
        await last.listening()
        for folder in double.left():
            assert folder.stat().st_mode & 0o777 == 0o700
            shutil.rmtree(folder)
        await last.stop()
        await one.start()
        assert await one.listening() == {"address": f"h:{one.pid}"}
    finally:
        await last.stop()
        await one.stop()


def test_it_ends_with_its_parent_however_that_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ``stop_with_stdin`` does to a real server is ``test_process.py``'s to say."""
    double = Double(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(double.path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(double.temporary)},
    ) as parent:
        try:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline().removeprefix(b"h:"))
            child = psutil.Process(pid)
            assert child.is_running()
        finally:
            parent.kill()
    child.wait(SOON_S)
    assert yaml.safe_load(double.settings.read_text())["stop_with_stdin"] is True
    (left,) = double.left()
    monkeypatch.setattr(tempfile, "tempdir", str(double.temporary))
    with closing(OwnFolder("router")) as folder:  # as the next parent does
        assert double.left() == [folder.path] != [left]

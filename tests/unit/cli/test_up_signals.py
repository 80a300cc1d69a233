"""How ``diptych up`` ends where nobody reads what it says any more."""

import subprocess
import sys

import pytest

_PROGRAM = """
import asyncio, os, signal, sys
from diptych.cli import up

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever the tests were told
{before}

async def use():
    stopped = up.cancel_on_signals()
    up.say("router", "finished")
    for each in {sent}:
        os.kill(os.getpid(), signal.Signals[each])
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        assert stopped.is_set()
        up.say("router", "ended")
        print("stopped")

asyncio.run(use())
"""
_NO_READER = "reader, writer = os.pipe(); os.dup2(writer, 2); os.close(reader)"
_NO_ROOM = "os.dup2(os.open('/dev/full', os.O_WRONLY), 2)"


def program(before: str, *sent: str) -> subprocess.CompletedProcess[str]:
    """One that is sent signals while it runs."""
    code = _PROGRAM.format(before=before, sent=sent)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("before", "sent"), [(_NO_READER, "SIGHUP"), (_NO_ROOM, "SIGTERM")])
def test_a_signal_ends_it_that_cannot_say_so(before: str, sent: str) -> None:
    """As that of a terminal that is closed, or of Ctrl-C, which reaches ``tee`` as well."""
    done = program(before, sent)
    assert (done.stdout, done.returncode) == ("stopped\n", 0)


def test_what_it_says_comes_line_by_line() -> None:
    done = program("", "SIGTERM")
    lines = ["router    | finished", "up        | stopping (SIGTERM)", "router    | ended"]
    assert done.stderr.splitlines() == lines


def test_it_outlives_its_terminal_where_nohup_says_so() -> None:
    done = program("signal.signal(signal.SIGHUP, signal.SIG_IGN)", "SIGHUP", "SIGTERM")
    assert "stopping (SIGTERM)" in done.stderr
    assert "SIGHUP" not in done.stderr
    assert (done.stdout, done.returncode) == ("stopped\n", 0)

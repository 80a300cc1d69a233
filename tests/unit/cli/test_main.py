"""How commands end that nobody reads any more, and what they write where not all can be shown."""

import asyncio
import io
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from diptych.cli.main import main

_PROGRAM = """
import importlib, sys
from types import SimpleNamespace

module = importlib.import_module("diptych.cli.commands")

def run(args):
    {body}

module.importlib = SimpleNamespace(import_module=lambda name: SimpleNamespace(run=run))
sys.exit(module.run(["health"]))
"""


def command(body: str) -> list[str]:
    """One that does this."""
    return [sys.executable, "-c", _PROGRAM.format(body=body)]


@pytest.mark.parametrize(
    "body",
    [
        "while True: print('x' * 1000, flush=True)",
        "sys.stdin.read(); print('x')",  # which is written as it ends
        "sys.stdin.read(); print('x'); sys.exit(0)",
    ],
)
def test_who_reads_no_more_ends_a_command_without_a_word(
    monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "")
    pipe = subprocess.PIPE
    with subprocess.Popen(command(body), stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 141


@pytest.mark.parametrize("is_unbuffered", ["", "1"])
def test_what_cannot_be_written_is_one_line(
    monkeypatch: pytest.MonkeyPatch, is_unbuffered: str
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", is_unbuffered)
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command("print('x')"), stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert done.stderr == (
        b"diptych health: no room for what is written: No space left on device\n"
    )
    assert done.returncode == 2


@pytest.mark.parametrize(
    ("encoding", "shown"), [("latin-1", b"\xe9 ? ?\n"), ("utf-8", "é ✓ ".encode() + b"\xff\n")]
)
def test_a_terminal_of_few_characters_is_shown_a_mark_for_the_others(
    monkeypatch: pytest.MonkeyPatch, encoding: str, shown: bytes
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    done = subprocess.run(command(r"print('\xe9 \u2713 \udcff')"), capture_output=True, check=False)
    assert (done.stdout, done.stderr) == (shown, b"")


def test_ctrl_c_ends_a_command_that_waits_for_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event loop would take the first for itself, and go on waiting."""

    class Terminal(io.StringIO):
        def read(self, size: int | None = -1) -> str:
            with pytest.raises(RuntimeError):
                asyncio.get_running_loop()
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Terminal())
    assert main(["generate", "-"]) == 130


@pytest.mark.parametrize("loaded", ["pydantic", "diptych.cli.sampling_flags"])
def test_ctrl_c_while_it_loads_ends_a_command_without_a_word(loaded: str) -> None:
    # A test run in the background may have been told to ignore SIGINT.
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from diptych.cli import main\n"
        "sys.exit(main(['generate', '-']))\n"
    )
    command = [sys.executable, "-X", "importtime", "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stderr=pipe, text=True) as process:
        assert process.stderr is not None
        while loaded not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode in (-signal.SIGINT, 130), "130 to a shell, both"
    assert "Traceback" not in rest
    assert "KeyboardInterrupt" not in rest


@pytest.mark.parametrize("stream", ["0<&-", "1>&-", "2>&-"])
def test_a_stream_that_is_closed_is_an_empty_one(stream: str) -> None:
    body = "sys.stdin.read(); sys.stdout.write('x'); sys.stderr.write('y')"
    script = f'exec "$@" {stream}'
    done = subprocess.run(
        ["/bin/sh", "-c", script, "sh", *command(body)], input=b"", capture_output=True, check=False
    )
    assert done.returncode == 0
    assert done.stdout == (b"" if stream == "1>&-" else b"x")
    assert done.stderr == (b"" if stream == "2>&-" else b"y")


def test_input_that_is_no_text_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", given)
    assert main(["generate", "--prompt", "-"]) == 2
    assert capsys.readouterr().err == (
        "diptych generate: standard input: not utf-8 from byte 3 on\n"
    )

"""``diptych chat`` through its standard input, with a router over real gRPC."""

import asyncio
import contextlib
import io
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from diptych.cli.chat import run
from tests.integration.router_rig import Cluster, eventually, running

pytestmark = pytest.mark.asyncio(loop_scope="module")

# A test run in the background may have been told to ignore SIGINT, and its children with it.
START = """
import signal, sys
from diptych.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main(sys.argv[1:]))
"""
CHAT = [sys.executable, "-c", START, "chat"]
SOON_S = 20.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(wide_model: Path) -> AsyncIterator[Cluster]:
    async with running(wide_model, 1, 1) as up:
        yield up


async def talk(
    monkeypatch: pytest.MonkeyPatch, cluster: Cluster, *lines: str, args: tuple[str, ...] = ()
) -> int:
    """Say these lines; the exit code."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    flags = ["--address", cluster.address, "--max-tokens", "2", "--ignore-eos", *args]
    return await asyncio.to_thread(run, flags)


def num_asked(cluster: Cluster) -> int:
    return len(cluster.prefill[0].specs)


def lengths(cluster: Cluster) -> list[int]:
    """Of each prompt that was asked for, in tokens."""
    return [spec.num_prompt_tokens for spec in cluster.prefill[0].specs]


async def test_answers_build_on_what_was_said(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = num_asked(cluster)
    said = ("one", "", "two", "/stats", "/clear", "one", "/set max_tokens 3", "three", "/exit", "x")
    assert await talk(monkeypatch, cluster, *said) == 0
    first, second, again, other = lengths(cluster)[before:]
    assert first == again < second
    assert other > again
    answers = [spec.sampling.max_tokens for spec in cluster.prefill[0].specs[before:]]
    assert answers == [2, 2, 2, 3]
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert len(lines[0]) == len(lines[1]) == 2, "an answer is a line"
    assert any(line.startswith("TTFT") for line in lines)


@pytest.mark.parametrize("word", ["/exit", "/bye", "/quit"])
async def test_a_word_ends_it(
    word: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = num_asked(cluster)
    assert await talk(monkeypatch, cluster, word, "unheard") == 0
    assert num_asked(cluster) == before
    assert capsys.readouterr() == ("", "")


async def test_an_error_is_one_line_and_the_conversation_goes_on(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = num_asked(cluster)
    wrong = ("/set top_p 7", "/nonsense", "/set stop_token_ids 9999999", "refused")
    lines = (*wrong, "/set stop_token_ids", "taken", "//etc is a folder")
    assert await talk(monkeypatch, cluster, *lines) == 0
    assert num_asked(cluster) == before + 2
    captured = capsys.readouterr()
    errors = captured.err.splitlines()
    assert [line.split(":")[:2] for line in errors] == [
        ["REQUEST_INVALID", " sampling.top_p"],
        ["REQUEST_INVALID", " /nonsense"],
        ["REQUEST_INVALID", " sampling.stop_token_ids[0]"],
    ]


async def test_a_model_without_a_chat_template_says_so(
    wide_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(wide_model, plain)
    path = plain / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["chat_template"]
    path.write_text(json.dumps(settings))
    async with running(plain, 1, 1) as cluster:
        assert await talk(monkeypatch, cluster, "hello") == 1
        assert await talk(monkeypatch, cluster, "hello", args=("--model", "other")) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("diptych chat: REQUEST_INVALID: model: plain has no chat template; ")
    assert second == "diptych chat: MODEL_NOT_FOUND: no model 'other'; there is plain"


@contextlib.asynccontextmanager
async def child(cluster: Cluster) -> AsyncIterator[asyncio.subprocess.Process]:
    """The command as a process of its own; what it writes to stderr is ours."""
    process = await asyncio.create_subprocess_exec(
        *CHAT,
        *("--address", cluster.address, "--ignore-eos"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_ctrl_c_ends_the_answer_and_not_the_program(cluster: Cluster) -> None:
    before = num_asked(cluster)
    async with child(cluster) as process, asyncio.timeout(SOON_S):
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"go on for ever\n")
        begun = await process.stdout.read(10)
        assert begun
        process.send_signal(signal.SIGINT)
        await eventually(lambda: cluster.held() == 0, "the request goes on")
        process.stdin.write(b"/stats\n/set max_tokens 2\nand now?\n")
        while b"no answer, or it did not come to its end" not in (
            line := await process.stdout.readline()
        ):
            assert line
        process.stdin.close()  # as Ctrl-D
        rest = (await process.stdout.read()).decode().splitlines()
        assert await process.wait() == 0
    assert rest[0] == "max_tokens is 2"
    assert cluster.prefill[0].specs[-1].sampling.max_tokens == 2
    first, second = lengths(cluster)[before:]
    assert second > first + 10, "what had come of the answer is part of what was said"


async def test_at_a_terminal_ctrl_c_asks_for_another_line_and_ctrl_d_ends(cluster: Cluster) -> None:
    ours, theirs = os.openpty()
    process = start_at(theirs, cluster.address)
    try:
        await asyncio.to_thread(read_until, ours, b"Ctrl-D ends.", b"> ")
        # One that comes as the line begins to be waited for is heard at the next key.
        while not select.select([ours], [], [], 1.0)[0]:
            process.send_signal(signal.SIGINT)
            await asyncio.sleep(0.2)
        await asyncio.to_thread(read_until, ours, b"> ")
        os.write(ours, b"/system\n")
        await asyncio.to_thread(read_until, ours, b"no system message", b"> ")
        os.write(ours, b"\x04")
        assert await asyncio.to_thread(process.wait, SOON_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def start_at(terminal: int, address: str) -> "subprocess.Popen[bytes]":
    """The command at a terminal, which is its own from now on."""
    command = [*CHAT, "--address", address]
    try:
        return subprocess.Popen(command, stdin=terminal, stdout=terminal)
    finally:
        os.close(terminal)


def read_until(terminal: int, *parts: bytes) -> None:
    """Wait until these were shown, one after another."""
    shown = b""
    for part in parts:
        while part not in shown:
            ready, _, _ = select.select([terminal], [], [], SOON_S)
            assert ready, f"no {part!r} in {shown!r}"
            shown += os.read(terminal, 4096)
        shown = shown.partition(part)[2]

"""What is forked ends, answers and is told apart as ``python -m`` would be."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.fork_server import Forked, ForkServer, Started, start_role
from tests.waiting import until

LISTEN = [
    "--no-http",
    "--model",
    "demo",
    "--listen",
    "127.0.0.1:0",
    "--prefill",
    "127.0.0.1:1",
    "--decode",
    "127.0.0.1:1",
]


def start(work: Path, args: Sequence[str]) -> Started:
    with (work / "log").open("ab") as log:
        return start_role("router", list(args), log)


def test_it_ends_with_the_exit_code_of_the_role(tmp_path: Path) -> None:
    helped, refused = start(tmp_path, ["--help"]), start(tmp_path, ["--listne", "a:1"])
    assert (helped.wait(60), refused.wait(60)) == (0, 2)
    log = (tmp_path / "log").read_text()
    assert "usage: diptych router" in log
    assert "listne" in log


@pytest.mark.asyncio
async def test_it_takes_signals_as_any_process(tmp_path: Path) -> None:
    port_file = tmp_path / "port.json"
    started = start(tmp_path, [*LISTEN, "--port-file", str(port_file)])
    try:
        await until(port_file.exists, 60, "listening")
        assert isinstance(started, Forked)
        assert psutil.Process(started.pid).open_files()[0].path == str(tmp_path / "log")
        with pytest.raises(subprocess.TimeoutExpired):
            started.wait(0)
        started.terminate()
        assert started.wait(60) == 0
    finally:
        started.kill()
    killed = start(tmp_path, LISTEN)
    killed.kill()
    assert killed.wait(60) == -signal.SIGKILL
    assert killed.poll() == -signal.SIGKILL
    assert not psutil.pid_exists(killed.pid)


def test_nothing_outlives_the_test_run(tmp_path: Path) -> None:
    server = ForkServer("router")
    with (tmp_path / "log").open("ab") as log:
        process = server.start("router", LISTEN, log)
    server.close()
    assert process.wait(60) == -signal.SIGKILL


_DIES = """
import os, sys, time
from pathlib import Path
from tests.fork_server import start_role

log, ports, module = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
started = start_role(module, sys.argv[4:] + ["--port-file", str(ports)], log.open("ab"))
while not ports.exists():
    time.sleep(0.05)
print(started.pid, flush=True)
os._exit(0)
"""


def test_nor_does_what_is_not_forked(tmp_path: Path) -> None:
    """The run was killed, and nobody ends what it has started."""
    command = [sys.executable, "-c", _DIES, str(tmp_path / "log"), str(tmp_path / "ports")]
    role = ["tests.integration.example_role", "--listen", "127.0.0.1:0"]
    run = subprocess.run([*command, *role], stdout=subprocess.PIPE, timeout=60)
    pid = int(run.stdout)
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(60)


def test_who_breaks_off_a_start_leaves_nothing_behind(tmp_path: Path) -> None:
    """The run was killed while it waited for the first answer."""
    server = ForkServer("router")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with (tmp_path / "log").open("ab") as log, theirs:
        asked = json.dumps([str(tmp_path), "router", *LISTEN]).encode()
        socket.send_fds(server._requests, [asked], [log.fileno(), theirs.fileno()])
    ours.close()
    with (tmp_path / "log").open("ab") as log:
        process = server.start("router", LISTEN, log)
    family = psutil.Process(process.pid).parent()
    assert family is not None
    children = family.children()
    assert len(children) == 2
    server.close()
    assert process.wait(60) == -signal.SIGKILL
    assert not psutil.wait_procs(children, timeout=60)[1]


@pytest.mark.parametrize("name", ["TORCHINDUCTOR_CACHE_DIR", "UCX_TLS"])
def test_what_libraries_note_in_the_environment_is_no_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """They do once for a whole test run, and every later process would be started anew."""
    start(tmp_path, ["--help"]).wait(60)
    monkeypatch.setenv(name, "anything")
    started = start(tmp_path, ["--help"])
    assert isinstance(started, Forked)
    assert started.wait(60) == 0


def test_another_environment_is_a_process_started_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path, ["--help"]).wait(60)
    monkeypatch.setenv("DIPTYCH_ROUTER_LISTNE", "nowhere")
    started = start(tmp_path, ["--model", "demo"])
    assert not isinstance(started, Forked)
    assert started.wait(60) == 2
    assert "DIPTYCH_ROUTER_LISTNE" in (tmp_path / "log").read_text()

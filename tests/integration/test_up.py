"""``diptych up`` from outside: it serves, and leaves no process behind, however it ends."""

import contextlib
import json
import queue
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.hanging import hang_later

DIPTYCH = [sys.executable, "-m", "diptych.cli"]
WORKER_ARGS = "--worker-args=--num-blocks 64 --max-model-len 128"


class Up:
    """A running ``diptych up`` and its output so far."""

    def __init__(self, *args: str) -> None:
        self.process = subprocess.Popen(
            [*DIPTYCH, "up", "--port", "0", "--http-port", "0", WORKER_ARGS, *args],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._queue.put(line.rstrip("\n"))
        self._queue.put(None)

    def wait_for(self, part: str, within_s: float = 90) -> str:
        """The next line that contains ``part``."""
        deadline = time.monotonic() + within_s
        while True:
            line = self._queue.get(timeout=max(0.01, deadline - time.monotonic()))
            assert line is not None, "it ended:\n" + "\n".join(self.lines)
            self.lines.append(line)
            if part in line:
                return line

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def modules(self) -> list[str]:
        """What each child runs, sorted; every worker has its transport's agent as a child."""
        commands = [child.cmdline() for child in self.children()]
        return sorted(command[command.index("-m") + 1] for command in commands)

    def wait(self) -> tuple[int, str]:
        """Exit code and everything it wrote, once it has ended."""
        code = self.process.wait(40)
        self._reader.join()
        while (line := self._queue.get()) is not None:
            self.lines.append(line)
        return code, "\n".join(self.lines)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that still run. An ended orphan (a killed worker's agent) is the system's."""
    return [process for process in processes if process.is_running() and not ended(process)]


def ended(orphan: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return orphan.ppid() == 1 and orphan.status() == psutil.STATUS_ZOMBIE
    return True


@contextlib.contextmanager
def up(*args: str) -> Iterator[Up]:
    running = Up(*args)
    children: list[psutil.Process] = []
    try:
        yield running
        children = running.children() if running.process.poll() is None else []
    finally:
        running.close()
        for child in psutil.wait_procs(children, timeout=15)[1]:
            child.kill()


def test_it_serves_and_ends_cleanly(tiny_llama: Path, tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'batch.sqlite'}"
    batches = ("--batch-port", "0", "--batch-database", database)
    with up("--model", str(tiny_llama), *batches) as cluster:
        address = cluster.wait_for("router listens on").split("listens on ")[1].split(";")[0]
        pasted = shlex.split(cluster.wait_for("diptych chat --address").partition("| ")[2])
        assert pasted[0] == "diptych"
        chatted = subprocess.run(
            [*DIPTYCH, *pasted[1:], "--max-tokens", "4"],
            input="Hello!\n/stats\n",
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert chatted.returncode == 0, chatted.stderr
        assert "TTFT" in chatted.stdout
        _, url, _, header, _, body = shlex.split(cluster.wait_for("curl http").partition("| ")[2])
        name, _, value = header.partition(": ")
        answer = httpx.post(url, content=body, headers={name: value}, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"]
        page = httpx.get(cluster.wait_for("| http").partition("| ")[2])
        assert "<title>Diptych</title>" in page.text
        asked = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions"}
        messages = [{"role": "user", "content": "Hello!"}]
        lines = {"model": tiny_llama.name, "messages": messages, "max_tokens": 2}
        (tmp_path / "requests.jsonl").write_text(json.dumps({**asked, "body": lines}))
        submit = shlex.split(cluster.wait_for("diptych batch submit").partition("| ")[2])
        batch = subprocess.run(
            [*DIPTYCH, *submit[1:]], capture_output=True, text=True, timeout=60, cwd=tmp_path
        )
        assert batch.returncode == 0, batch.stderr
        assert (tmp_path / "batch.sqlite").exists()
        told = [part for child in cluster.children() for part in child.cmdline()]
        assert database not in told, "it may have a password, which a list of processes shows"
        command = [*DIPTYCH, "generate", "--address", address, "--prompt", "a b c"]
        done = subprocess.run(
            [*command, "--max-tokens", "4", "--ignore-eos", "--timing", "--seed", "1"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert "TTFT" in done.stderr
        assert "4 tokens, ITL" in done.stderr
        said = subprocess.run(
            [*DIPTYCH, "generate", "Hello", "--address", address, "--max-tokens", "2"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert said.returncode == 0, said.stderr
        shown = subprocess.run(
            [*DIPTYCH, "top", "--address", address], capture_output=True, text=True, timeout=60
        )
        assert shown.returncode == 0, shown.stderr
        assert "proven" in shown.stdout, "the pair"
        handed_off = subprocess.run(
            [
                *(*DIPTYCH, "generate", "--address", address, "--prompt", "a b c " * 25),
                *("--max-tokens", "4", "--ignore-eos", "--expect-handoff"),
            ],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert handed_off.returncode == 0, handed_off.stderr
        refused = subprocess.run(
            [*command, "--temperature", "-1"], capture_output=True, text=True, timeout=60
        )
        assert refused.returncode == 1
        assert "diptych generate: REQUEST_INVALID: " in refused.stderr
        assert "temperature" in refused.stderr

        children = cluster.children()
        assert cluster.modules() == [
            "batch_server",
            "decode_worker",
            *["kvtransfer.agents.main"] * 2,
            "prefill_worker",
            "router",
        ]
        cluster.process.send_signal(signal.SIGTERM)
        code, output = cluster.wait()
        assert code == 0, output
        assert not alive(children)
        assert "Traceback" not in output
        for level in ("warning", "error", "critical"):
            assert f'"level": "{level}"' not in output


def test_a_child_that_dies_is_reported_and_ends_it(tiny_llama: Path) -> None:
    with up("--model", str(tiny_llama), "--prefill", "0") as cluster:
        cluster.wait_for("diptych chat --address")
        children = cluster.children()
        assert cluster.modules() == ["decode_worker", "kvtransfer.agents.main", "router"]
        worker = next(c for c in children if "decode_worker" in c.cmdline())
        worker.kill()
        code, output = cluster.wait()
        assert code == 1
        assert "decode-0 was killed by signal 9; its last lines:" in output
        assert not alive(children)


def test_a_worker_that_hangs_is_reported_and_ends_it(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = hang_later(monkeypatch, "decode-0.json", tmp_path)
    timers = "--timers.heartbeat-s 0.2 --timers.lost-peer-s 1"
    with up("--model", str(tiny_llama), "--prefill", "0", f"{WORKER_ARGS} {timers}") as cluster:
        address = cluster.wait_for("router listens on").split("listens on ")[1].split(";")[0]
        cluster.wait_for("diptych chat --address")
        flag.touch()
        command = [*DIPTYCH, "generate", "--address", address, "--prompt", "a b c"]
        request = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            code, output = cluster.wait()
        finally:
            request.kill()
            request.wait()
        assert code == 1
        assert "decode-0 exited with code 1; its last lines:" in output
        assert "critical: the model thread is stuck" in output
        assert "the model thread is stuck: no engine step for" in output.splitlines()[-2]


def test_nothing_outlives_it_when_it_is_killed(tiny_llama: Path) -> None:
    """Here with workers of both roles, each of which reads from the other."""
    with up("--model", str(tiny_llama), "--soft", "2") as cluster:
        cluster.wait_for("ready after")
        children = cluster.children()
        assert not any("pairs of workers are proven" in line for line in cluster.lines)
        agents = ["kvtransfer.agents.main"] * 4  # one is read from and one reads, of each
        assert cluster.modules() == [*agents, "router", *["soft_worker"] * 2]
        cluster.process.kill()
        assert psutil.wait_procs(children, timeout=15)[1] == []


def test_what_cannot_start_says_why(tiny_llama: Path) -> None:
    with up("--model", str(tiny_llama), "--prefill", "0", "--router-args=--nope 1") as cluster:
        code, output = cluster.wait()
    assert code == 1
    assert "router exited with code 2; its last lines:" in output
    assert "unrecognized arguments: --nope" in output.splitlines()[-1]
    assert "Traceback" not in output


@pytest.mark.parametrize("flag", ["--port", "--http-port"])
def test_a_taken_port_is_one_line(tiny_llama: Path, flag: str) -> None:
    """Told before a worker starts, which would have shown a line."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with up("--model", str(tiny_llama), "--prefill", "0", flag, port) as cluster:
            code, output = cluster.wait()
    assert code == 2
    (line,) = output.splitlines()
    assert line.startswith(f"diptych up: {flag}: cannot bind 127.0.0.1:{port}: Address already")
    assert line.endswith("; 0 picks a free port")


def test_a_router_that_asks_for_a_key_is_one_line(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its own variables may have it, which processes of a cluster on one machine see too."""
    keys = tmp_path / "keys"
    keys.write_text("")
    monkeypatch.setenv("DIPTYCH_ROUTER_API_KEYS", str(keys))
    with up("--model", str(tiny_llama)) as cluster:
        code, told = cluster.wait()
    assert code == 2, told
    assert "diptych up: the router does not answer diptych up: a key is needed" in told
    assert "Traceback" not in told

"""Servers of the comparison are started for their turns and ended with all that they started."""

import asyncio
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import psutil

from tests.bench.machine_use import MachineUse
from tests.bench.peer_ratios import Scenario
from tests.bench.peer_servers import Server, Target
from tests.bench.peers import Comparison, Prompts

# Arguments: port, a file to which its child's id is added. Says first that it is loading; never
# gives more than 100 tokens.
SERVER = """
import http.server, json, subprocess, sys, time
child = subprocess.Popen(["sleep", "60"])
open(sys.argv[2], "a").write(f"{child.pid} ")
loading = [True]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(503 if loading else 200)
        self.end_headers()
        if loading:
            return loading.clear()
        if asked["max_tokens"] > 100:
            time.sleep(60)
        num_prompt_tokens, num_output_tokens = len(asked["prompt"].split()), asked["max_tokens"]
        usage = {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_output_tokens}
        for event in ({"choices": [{}]}, {"choices": [], "usage": usage}):
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
SCENARIOS = (Scenario("2 at a time", 2, 5, 3), Scenario("long prompt", 1, 9, 1))


class Words(Prompts):
    """A word is a token."""

    def __init__(self) -> None:
        pass

    def text(self, num_tokens: int) -> str:
        return "word " * num_tokens


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def server(name: str, port: int, code: str, *args: str, log: Path) -> Server:
    command = shlex.join([sys.executable, "-c", code, *args])
    return Server(name, False, f"http://127.0.0.1:{port}/v1", command, log)


async def test_servers_take_turns_and_one_that_fails_is_left_out(tmp_path: Path) -> None:
    ports, pids = [free_port(), free_port()], tmp_path / "pids"
    servers = [
        server("a", ports[0], SERVER, str(ports[0]), str(pids), log=tmp_path / "a.log"),
        server("bad", ports[1], "print('no such model')", log=tmp_path / "bad.log"),
        server("b", ports[1], SERVER, str(ports[1]), str(pids), log=tmp_path / "b.log"),
    ]
    comparison = Comparison(servers, SCENARIOS[:1], Words())
    await comparison.run(2)
    turns = [(row["round"], row["target"]) for row in comparison.rows]
    assert turns == [(0, "a"), (0, "b"), (1, "b"), (1, "a")]
    assert all(row["exact"] for row in comparison.rows)
    assert "no such model" in comparison.failures.pop("bad")
    assert not comparison.failures
    children = [int(pid) for pid in pids.read_text().split()]
    assert len(children) == 4
    assert not any(is_alive(pid) for pid in children)


async def test_a_kept_server_is_started_once_and_stands_still_between_its_turns(
    tmp_path: Path,
) -> None:
    ports, pids = [free_port(), free_port()], tmp_path / "pids"
    servers = [
        server(name, port, SERVER, str(port), str(pids), log=tmp_path / f"{name}.log")
        for name, port in zip("ab", ports, strict=True)
    ]
    seen: list[tuple[bool, ...]] = []  # of each row: which children stood still

    class Watched(Comparison):
        async def warm_up(self, target: Target) -> None:
            children = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
            seen.append(tuple(each.status() == psutil.STATUS_STOPPED for each in children))
            await super().warm_up(target)

    comparison = Watched(servers, SCENARIOS[:1], Words(), keep=True)
    await comparison.run(2)
    assert [row["target"] for row in comparison.rows] == ["a", "b", "b", "a"]
    assert seen == [(False,), (True, False), (True, False), (False, True)]
    children = [int(pid) for pid in pids.read_text().split()]
    assert len(children) == 2
    assert not any(is_alive(pid) for pid in children)


async def test_a_round_that_is_cut_short_ends_its_server(tmp_path: Path) -> None:
    port, pids = free_port(), tmp_path / "pids"
    first = server("a", port, SERVER, str(port), str(pids), log=tmp_path / "a.log")
    comparison = Comparison([first], [*SCENARIOS, Scenario("endless", 1, 5, 101)], Words())
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(comparison.run(1), name="run")
        async with asyncio.timeout(30.0):
            while len(comparison.rows) < len(SCENARIOS):
                await asyncio.sleep(0.05)
        task.cancel()
    assert task.cancelled()
    assert [row["scenario"] for row in comparison.rows] == [each.name for each in SCENARIOS]
    assert not is_alive(int(pids.read_text()))


async def test_a_server_in_the_place_of_another_is_not_measured(tmp_path: Path) -> None:
    port, pids = free_port(), str(tmp_path / "pids")
    running = server("a", port, SERVER, str(port), pids, log=tmp_path / "a.log")
    other = server("b", port, SERVER, str(port), pids, log=tmp_path / "b.log")
    async with running.running():
        comparison = Comparison([other], SCENARIOS, Words())
        await comparison.run(1)
    assert "something answers there" in comparison.failures["b"]
    assert not comparison.rows


def test_what_was_started_here_is_not_counted_as_others() -> None:
    busy = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    use = MachineUse()
    with subprocess.Popen(
        [sys.executable, "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        used = use.since()
        child.communicate(b"\n")
    counted_s = (used.cores_busy - used.others_cores) * used.elapsed_s  # by the kernel
    assert counted_s >= 0.25
    assert any(name.startswith(f"{child.pid} ") for name in used.processes)

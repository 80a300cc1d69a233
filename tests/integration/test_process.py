"""A server process from outside: signals, exit codes, health, reflection, metrics, ports."""

import asyncio
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from asyncio import StreamReader, StreamWriter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from diptych.errors import ConfigurationError
from diptych.process import ProcessConfig
from diptych.rpc.channel import open_channel
from diptych.service_host import ServiceHost
from diptych.v1 import inference_pb2

ROLE = Path(__file__).with_name("example_role.py")


@contextmanager
def role(tmp_path: Path, *args: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """The process, and what its port file says."""
    port_file = tmp_path / "port.json"
    command = [sys.executable, str(ROLE), "--port-file", str(port_file), "--metrics-port", "0"]
    process = subprocess.Popen(
        [*command, *args], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 20
        while not port_file.exists() and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield process, json.loads(port_file.read_text())
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stderr):
            if pipe is not None:
                pipe.close()


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and log of a process that ends by itself."""
    log = process.communicate(timeout=15)[1]
    return process.returncode, log


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_cleanly(tmp_path: Path, signum: signal.Signals) -> None:
    with role(tmp_path) as (process, _):
        process.send_signal(signum)
        code, log = end(process)
    assert code == 0
    lines = [json.loads(line) for line in log.splitlines()]
    assert [line["message"] for line in lines] == ["listening", "stopping"]
    assert lines[1]["signal"] == signum.name


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with role(tmp_path, "--fail", "hang") as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        while "stopping" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=5) == 128 + signal.SIGTERM


def test_it_stops_with_its_parent(tmp_path: Path) -> None:
    with role(tmp_path, "--stop-with-stdin") as (process, _):
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=10) == 0


@pytest.mark.parametrize(("fail", "code"), [("bug", 1), ("configuration", 2)])
def test_exit_codes(tmp_path: Path, fail: str, code: int) -> None:
    with role(tmp_path, "--fail", fail) as (process, _):
        got, log = end(process)
    assert got == code
    last = log.splitlines()[-1]
    if fail == "bug":
        assert "ValueError: a bug" in json.loads(last)["exception"]
    else:
        assert last == "diptych example: --fail: asked for"


def test_it_does_not_wait_for_a_thread_that_is_stuck(tmp_path: Path) -> None:
    with role(tmp_path, "--fail", "stuck") as (process, _):
        got, log = end(process)
    assert got == 1
    assert "StuckThreadError: a thread is stuck" in json.loads(log.splitlines()[-1])["exception"]


def test_who_is_stopped_amid_its_start_ends_well_without_the_thread_that_goes_on(
    tmp_path: Path,
) -> None:
    with role(tmp_path, "--fail", "unfinished") as (process, _):
        process.send_signal(signal.SIGTERM)
        got, log = end(process)
    assert got == 0
    last = json.loads(log.splitlines()[-1])
    assert (last["level"], last["message"]) == ("warning", "ended amid its start")
    assert last["why"] == "a thread goes on"


def test_a_bug_amid_such_an_end_is_one(tmp_path: Path) -> None:
    with role(tmp_path, "--fail", "unfinished-bug") as (process, _):
        process.send_signal(signal.SIGTERM)
        got, log = end(process)
    assert got == 1
    assert "ValueError: a bug" in json.loads(log.splitlines()[-1])["exception"]


@pytest.mark.parametrize(("fail", "code"), [("off-loop", 1), ("off-loop-configuration", 2)])
def test_it_waits_for_what_runs_beside_the_loop_for_a_moment_only(
    tmp_path: Path, fail: str, code: int
) -> None:
    with role(tmp_path, "--fail", fail) as (process, _):
        begin_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        got, log = end(process)
        assert time.monotonic() - begin_s < 8
    assert got == code
    lines = log.splitlines()
    if code == 2:
        assert lines.pop() == "diptych example: --fail: asked for"
    assert json.loads(lines[-1])["at"] == "__main__.read_what_never_comes"


def test_it_takes_the_files_that_it_may_have(tmp_path: Path) -> None:
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))
    try:
        with role(tmp_path) as (process, _):
            found = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    wanted = 65_536 if most == resource.RLIM_INFINITY else min(65_536, most)
    assert found == (max(256, wanted), most)


def test_a_taken_port_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, str(ROLE), "--listen", address], capture_output=True, text=True
        )
    assert done.returncode == 2
    line = f"diptych example: --listen: cannot bind {address}: in use, or not an address"
    assert line in done.stderr
    assert "Traceback" not in done.stderr


def test_the_last_collection_is_skipped() -> None:
    code = (
        "import atexit, gc, sys\n"
        "from tests.integration.example_role import ExampleConfig, main, serve\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 0))\n"
        "sys.exit(main(ExampleConfig, serve, ['--no-such-setting']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "True\n"), done.stderr


@pytest.mark.parametrize("module", ["router", "decode_worker"])
def test_no_collection_looks_at_modules(module: str) -> None:
    code = (
        "import atexit, gc, runpy, sys\n"
        "most = 0\n"
        "def seen(phase, info):\n"
        "    global most\n"
        "    most = max(most, len(gc.get_objects()))\n"
        "gc.callbacks.append(seen)\n"
        "atexit.register(lambda: print(most, gc.get_freeze_count()))\n"
        "sys.argv[0] = 'role'\n"
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)\n"
    )
    command = [sys.executable, "-c", code, "--listne", "a:1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    num_looked_at, num_loaded = map(int, done.stdout.split())
    assert num_loaded > 80_000
    assert num_looked_at < 60_000, "of what every process starts with"


@pytest.mark.parametrize(
    "main",
    sorted(Path(__file__).parents[2].glob("*/__main__.py")),
    ids=lambda path: str(path.parent.name),
)
def test_every_role_is_loaded_without_collections(main: Path) -> None:
    before, _, role = main.read_text().partition("with loading():\n")
    assert "    from " in role
    assert re.findall(r"^(?:import|from) (\w+)", before, re.M) in (
        ["sys", "diptych"],
        ["gc", "sys", "diptych"],
    )


@pytest.mark.parametrize("module", ["router", "soft_worker"])
def test_an_interrupt_while_it_loads_ends_it_without_a_word(module: str) -> None:
    # A test run in the background may have been told to ignore SIGINT.
    code = (
        "import signal, runpy\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)\n"
    )
    command = [sys.executable, "-X", "importtime", "-c", code]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "pydantic" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == -signal.SIGINT
    assert "Traceback" not in rest
    assert "KeyboardInterrupt" not in rest


def test_what_settled_is_not_looked_at_again() -> None:
    code = (
        "import gc, weakref, torch\n"
        "from diptych.process import settle\n"
        "class Garbage: pass\n"
        "garbage = Garbage(); garbage.itself = garbage\n"
        "seen = weakref.ref(garbage); del garbage\n"
        "before = len(gc.get_objects()); settle()\n"
        "print(before, len(gc.get_objects()), seen())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    num_before, num_after, seen = done.stdout.split()
    assert int(num_before) > 100_000
    assert int(num_after) < 1000
    assert seen == "None"


class TestHost:
    """A host inside this process."""

    async def test_health_follows_the_role(self) -> None:
        async with ServiceHost(ProcessConfig()) as host:
            await host.start(["diptych.v1.Inference"])
            async with open_channel(host.address) as channel:
                stub = health_pb2_grpc.HealthStub(channel)

                async def status(service: str) -> int:
                    reply = await stub.Check(health_pb2.HealthCheckRequest(service=service))
                    return int(reply.status)

                is_up = health_pb2.HealthCheckResponse.SERVING
                is_not = health_pb2.HealthCheckResponse.NOT_SERVING
                service = "diptych.v1.Inference"
                assert (await status(""), await status(service)) == (is_up, is_not), "loading"
                host.set_serving(True)
                assert (await status(""), await status(service)) == (is_up, is_up)
                host.set_serving(False)
                assert (await status(""), await status(service)) == (is_up, is_not), "draining"
                host.set_failed()
                assert (await status(""), await status(service)) == (is_not, is_not)

    async def test_one_that_answers_late_is_reached(self) -> None:
        """By the first call, which fails where the first attempt to connect does."""

        async def answer_late(reader: StreamReader, writer: StreamWriter) -> None:
            await asyncio.sleep(1)
            to_read, to_write = await asyncio.open_connection("127.0.0.1", host.port)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_forward(reader, to_write))
                tasks.create_task(_forward(to_read, writer))

        async with ServiceHost(ProcessConfig()) as host:
            await host.start([])
            async with await asyncio.start_server(answer_late, "127.0.0.1", 0) as late:
                port = late.sockets[0].getsockname()[1]
                async with open_channel(f"127.0.0.1:{port}") as channel:
                    stub = health_pb2_grpc.HealthStub(channel)
                    await stub.Check(health_pb2.HealthCheckRequest())

    async def test_reflection_describes_the_role(self) -> None:
        async with ServiceHost(ProcessConfig()) as host:
            await host.start(["diptych.v1.Inference"])
            async with open_channel(host.address) as channel:
                stub = reflection_pb2_grpc.ServerReflectionStub(channel)
                service = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
                asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol=service)
                call = stub.ServerReflectionInfo(iter([asked]))
                async for reply in call:
                    raw = reply.file_descriptor_response.file_descriptor_proto
                    names = {FileDescriptorProto.FromString(each).name for each in raw}
                    assert "diptych/v1/inference.proto" in names

    async def test_a_scrape_runs_on_the_loop(self) -> None:
        async with ServiceHost(ProcessConfig(metrics_port=0)) as host:
            await host.start([])
            loop = asyncio.get_running_loop()

            def read() -> float:
                assert asyncio.get_running_loop() is loop
                return 7.0

            host.metrics.read_gauge("example", "An example.", read)
            text = await asyncio.to_thread(_scrape, f"http://{host.metrics_address}/metrics")
            some = f"http://{host.metrics_address}/metrics?name[]=diptych_example"
            asked = await asyncio.to_thread(_scrape, some)
        assert "diptych_example 7.0" in text
        samples = [line for line in asked.splitlines() if not line.startswith("#")]
        assert samples == ["diptych_example 7.0"]
        assert "diptych_asyncio_tasks " in text
        assert "process_open_fds" in text
        assert 'diptych_build_info{role="process"' in text

    async def test_two_hosts_in_one_process(self) -> None:
        config = ProcessConfig(metrics_port=0)
        async with ServiceHost(config) as one, ServiceHost(config) as two:
            await one.start([])
            await two.start([])
            assert one.port != two.port
            assert one.metrics_port != two.metrics_port

    async def test_a_taken_metrics_port_is_named(self) -> None:
        async with ServiceHost(ProcessConfig(metrics_port=0)) as one:
            await one.start([])
            config = ProcessConfig(metrics_port=one.metrics_port)
            async with ServiceHost(config) as two:
                with pytest.raises(ConfigurationError, match="--metrics-port: cannot bind"):
                    await two.start([])

    @pytest.mark.parametrize("listen", ["50051", "localhost", "host:port", ":1", "a:70000"])
    def test_a_bad_listen_address_is_named(self, listen: str) -> None:
        with pytest.raises(ConfigurationError, match="--listen: expected host:port"):
            ServiceHost(ProcessConfig(listen=listen))


async def _forward(reader: StreamReader, writer: StreamWriter) -> None:
    while data := await reader.read(2**16):
        writer.write(data)
    writer.close()


def _scrape(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as reply:
        text: str = reply.read().decode()
        return text


ENDINGS = {
    "exit": ("print('went on', flush=True); sys.exit(3)", 3),
    "complaint": ("print('went on', flush=True); sys.exit(run(refuse, ProcessConfig()))", 2),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_log_that_nobody_reads_stops_nothing(ending: str) -> None:
    """Far more lines than a pipe holds; the process goes on, and ends with its own code."""
    end, code = ENDINGS[ending]
    program = (
        "import logging, sys\n"
        "from diptych.errors import ConfigurationError\n"
        "from diptych.process import ProcessConfig, run\n"
        "from diptych.telemetry import logs\n"
        "async def refuse(config, stop, ready):\n"
        "    for _ in range(3000): logging.getLogger('a').info('x' * 100)\n"
        "    raise ConfigurationError('asked for')\n"
        "logs.set_up('x')\n"
        "for _ in range(3000): logging.getLogger('a').info('x' * 100)\n"
        f"{end}"
    )
    # As programs run: that variable takes the lock from standard error, and hides who needs it.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            assert process.wait(timeout=30) == code
            assert process.stdout is not None
            assert process.stdout.read() == "went on\n"
        finally:
            process.kill()


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_it_serves_and_ends_well_where_no_standard_files_are_open(
    tiny_llama: Path, tmp_path: Path, closed: str
) -> None:
    port_file = tmp_path / "port.json"
    settings = ["--model", str(tiny_llama), "--decode", "127.0.0.1:1", "--no-http"]
    command = [sys.executable, "-m", "router", "--port-file", str(port_file), *settings]
    with subprocess.Popen(["sh", "-c", f'exec "$@" {closed}', "sh", *command]) as process:
        try:
            deadline = time.monotonic() + 60
            while not port_file.exists():
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
            process.terminate()
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()

"""A router's parent keeps its processes; how they are set, which die, which are replaced."""

import asyncio
import json
import logging
import shutil
import socket
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from diptych import settings
from diptych.child_process import Addresses
from diptych.errors import ConfigurationError
from router import processes
from router.child import config_of
from router.config import RouterConfig
from router.processes import Processes, ProcessFailedError, ports_of, reserve
from tests.virtual_time import run_virtually


class FakeChild:
    """A process that listens or ends when it is told to."""

    def __init__(self, index: int, pid: int, *, dies_with: int | OSError | None = None) -> None:
        """``dies_with``: an exit code, before it listens; or it cannot even be started."""
        self.index, self.pid = index, pid
        self.made_s = self.ended_s = asyncio.get_running_loop().time()
        self.num_stops = 0
        self.listens, self.over, self.hangs = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._code = 0
        self._refusal = dies_with if isinstance(dies_with, OSError) else None
        if dies_with is None:
            self.listens.set()
        elif not isinstance(dies_with, OSError):
            self.end(dies_with)

    def end(self, code: int) -> None:
        self._code = code
        if not self.over.is_set():
            self.ended_s = asyncio.get_running_loop().time()
            self.over.set()

    async def start(self) -> None:
        """It begins as it was made."""
        if self._refusal is not None:
            raise self._refusal

    async def listening(self) -> Addresses:
        await self.listens.wait()
        return {"address": "h:1", "metrics_address": f"h:{self.pid}"}

    async def ended(self) -> int:
        await self.over.wait()
        return self._code

    async def hanging(self) -> None:
        await self.hangs.wait()

    def kill(self) -> None:
        self.end(-9)

    async def stop(self) -> None:
        self.num_stops += 1
        if self._refusal is None and not self.over.is_set():
            await asyncio.sleep(1.0)  # it drains
        self.end(self._code)


class Router:
    """Its processes, and what their parent was told."""

    def __init__(
        self, count: int, dies: Callable[[int, int], int | OSError | None] = lambda *_: None
    ) -> None:
        """``dies``: with what the n-th process at an index ends before it listens."""
        self.children: list[FakeChild] = []
        self.told: list[list[str]] = []
        self.stop = asyncio.Event()
        self.loads = False  # who is made from now on: it listens when the test says so
        self._dies = dies
        self._processes = Processes(count, self._make, self._on_listening)

    def _make(self, index: int) -> FakeChild:
        nth = sum(child.index == index for child in self.children)
        made = FakeChild(index, 100 + len(self.children), dies_with=self._dies(index, nth))
        if self.loads:
            made.listens.clear()
        self.children.append(made)
        return made

    def _on_listening(self, addresses: object) -> None:
        assert isinstance(addresses, list)
        self.told.append([each["metrics_address"] for each in addresses])

    async def run(self) -> None:
        await self._processes.run(self.stop)

    async def until_told(self, count: int) -> None:
        while len(self.told) < count:
            await asyncio.sleep(0.1)


def test_all_are_started_and_all_are_ended_side_by_side() -> None:
    async def live() -> float:
        router = Router(3)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(router.run())
            await router.until_told(1)
            began_s = asyncio.get_running_loop().time()
            router.stop.set()
        assert router.told == [["h:100", "h:101", "h:102"]]
        assert [child.num_stops for child in router.children] == [1, 1, 1]
        return asyncio.get_running_loop().time() - began_s

    assert run_virtually(live()) == pytest.approx(1.0)


def test_one_that_dies_is_told_of_and_replaced(caplog: pytest.LogCaptureFixture) -> None:
    async def live() -> None:
        router = Router(2)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(router.run())
            await router.until_told(1)
            router.children[1].end(-9)
            await router.until_told(2)
            router.stop.set()
        assert [child.index for child in router.children] == [0, 1, 1]
        assert router.told[1] == ["h:100", "h:102"]

    with caplog.at_level(logging.ERROR):
        run_virtually(live())
    (record,) = caplog.records
    said = {name: record.__dict__[name] for name in ("index", "pid", "exit_code")}
    assert said == {"index": 1, "pid": 101, "exit_code": -9}


def test_one_that_hangs_is_ended_and_replaced(caplog: pytest.LogCaptureFixture) -> None:
    async def live() -> None:
        router = Router(2)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(router.run())
            await router.until_told(1)
            router.children[0].hangs.set()
            await router.until_told(2)
            router.stop.set()
        assert router.told[1] == ["h:102", "h:101"]

    with caplog.at_level(logging.ERROR):
        run_virtually(live())
    hung, ended = caplog.records
    assert "hangs" in hung.message
    for record in (hung, ended):
        assert (record.__dict__["index"], record.__dict__["pid"]) == (0, 100)
    assert ended.__dict__["exit_code"] == -9


def test_a_replacement_that_does_not_listen_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """It may load for long, so nobody ends it; but one process less serves."""

    async def live() -> None:
        router = Router(2)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(router.run())
            await router.until_told(1)
            router.loads = True
            router.children[1].end(-9)
            await asyncio.sleep(150.0)
            router.children[2].listens.set()
            await router.until_told(2)
            await asyncio.sleep(150.0)
            router.stop.set()
        assert [child.num_stops for child in router.children] == [1, 1, 1]

    with caplog.at_level(logging.WARNING):
        run_virtually(live())
    _, *late = caplog.records
    assert [(vars(record)["index"], vars(record)["pid"]) for record in late] == [(1, 102)] * 2
    assert {record.message for record in late} == {"a process of the router does not listen yet"}


@pytest.mark.parametrize(
    ("end", "kind"),
    [(1, ProcessFailedError), (2, ConfigurationError), (OSError("no room"), OSError)],
)
def test_one_that_ends_before_it_listens_ends_all(
    end: int | OSError, kind: type[Exception]
) -> None:
    async def live() -> None:
        router = Router(2, lambda index, n: end if (index, n) == (1, 0) else None)
        with pytest.RaisesGroup(kind, flatten_subgroups=True):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(router.run())
        assert all(child.num_stops for child in router.children)
        assert len(router.children) == 2

    run_virtually(live())


def pauses_s(router: Router, index: int) -> list[float]:
    """From the end of each process of an index until the next was made."""
    those = [child for child in router.children if child.index == index]
    return [later.made_s - earlier.ended_s for earlier, later in pairwise(those)]


@pytest.mark.parametrize("end", [1, 2, OSError("no room")])
def test_a_replacement_that_cannot_start_is_tried_again_and_ends_nobody(
    end: int | OSError, caplog: pytest.LogCaptureFixture
) -> None:
    async def live() -> None:
        router = Router(2, lambda index, n: end if index == 1 and 0 < n < 9 else None)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(router.run())
            await router.until_told(1)
            router.children[1].end(-9)
            await router.until_told(2)
            assert router.children[0].num_stops == 0
            router.stop.set()
        assert pauses_s(router, 1) == pytest.approx([0, 1, 2, 4, 8, 16, 30, 30, 30])
        assert router.told[1] == ["h:100", f"h:{router.children[-1].pid}"]
        assert all(child.num_stops == 1 for child in router.children)

    with caplog.at_level(logging.ERROR):
        run_virtually(live())
    failed = [each for each in caplog.records if "could not be replaced" in each.message]
    assert [each.__dict__["index"] for each in failed] == [1] * 8


def test_those_that_listen_and_die_are_replaced_after_pauses_until_one_stays() -> None:
    """Each lives for a second, but for one, which lives for as long as says that all is well."""

    async def live() -> None:
        router = Router(2)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(router.run())
            for nth, lives_s in enumerate([1, 1, 1, 1, 60, 1, 1], 1):
                await router.until_told(nth)
                await asyncio.sleep(lives_s)
                router.children[-1].end(-9)
            await router.until_told(8)
            router.stop.set()
        assert pauses_s(router, 1) == pytest.approx([0, 1, 2, 4, 0, 1, 2])

    run_virtually(live())


def test_a_port_file_that_cannot_be_written_again_ends_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    children: list[FakeChild] = []

    def make(config: RouterConfig, patience_s: float) -> FakeChild:
        children.append(FakeChild(len(children), 100 + len(children)))
        return children[-1]

    monkeypatch.setattr(processes, "RouterProcess", make)
    path = tmp_path / "gone" / "ports.json"
    path.parent.mkdir()
    told: list[int] = []

    async def live() -> None:
        stop = asyncio.Event()
        ports = ("--listen", "127.0.0.1:0", "--http-port", "0", "--port-file", str(path))
        async with asyncio.TaskGroup() as tasks:
            config = load("--processes", "2", *ports)
            tasks.create_task(processes.serve(config, stop, told.append))
            await asyncio.sleep(1)
            shutil.rmtree(path.parent)
            children[1].end(-9)
            await asyncio.sleep(1)
            assert len(children) == 3
            assert children[0].num_stops == 0
            path.parent.mkdir()
            children[2].end(-9)
            await asyncio.sleep(2)
            stop.set()
        assert json.loads(path.read_text())["metrics_addresses"] == ["h:100", "h:103"]

    run_virtually(live())
    assert len(told) == 1
    assert [each.message for each in caplog.records].count("the port file is out of date") == 1


def load(*args: str) -> RouterConfig:
    whole = ["--model", "m", "--decode", "a:1", *args]
    return settings.load(RouterConfig, whole, prog="diptych router", env_prefix="DIPTYCH_ROUTER_")


def test_each_shares_two_ports_and_has_the_others_for_itself() -> None:
    config = load(
        *("--processes", "3", "--listen", "[::1]:0", "--metrics-port", "9100"),
        *("--health-port", "0", "--max-queue", "7"),
    )
    second = config_of(config, 1, 50051, 8000)
    assert (second.listen, second.http_port) == ("[::1]:50051", 8000)
    assert (second.shares_ports, second.processes, second.http_metrics) == (True, 1, False)
    assert (second.metrics_port, second.health_port) == (9101, 0)
    assert config_of(load(), 1, 1, 2).metrics_port is None
    assert second.max_queue == 7


def test_its_settings_pass_through_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "settings.yaml"
    config = load("--processes", "2", "--quota.max-concurrent", "3", "--file.interval-s", "1.0")
    first = config_of(config, 0, 50051, 8000)
    path.write_text(first.model_dump_json(exclude_defaults=True))
    monkeypatch.setenv("DIPTYCH_ROUTER_PROCESSES", "2")
    monkeypatch.setenv("DIPTYCH_ROUTERS", "mine")
    environment = settings.environment_without("DIPTYCH_ROUTER_")
    assert "DIPTYCH_ROUTER_PROCESSES" not in environment
    assert environment["DIPTYCH_ROUTERS"] == "mine"
    monkeypatch.delenv("DIPTYCH_ROUTER_PROCESSES")
    read = settings.load(
        RouterConfig, ["--config", str(path)], prog="router", env_prefix="DIPTYCH_ROUTER_"
    )
    assert read == first


@pytest.mark.parametrize("setting", ["metrics-port", "health-port"])
def test_ports_beyond_the_last_are_refused(setting: str) -> None:
    load("--processes", "2", f"--{setting}", "65534")
    with pytest.raises(ConfigurationError, match=f"--{setting}: 65535 .* 2 processes"):
        load("--processes", "2", f"--{setting}", "65535")


@pytest.mark.parametrize(
    ("ports", "said"),
    [
        (["metrics-port", "9100", "health-port", "9102"], "9100 to 9102, .* --health-port takes"),
        (["metrics-port", "9102", "health-port", "9100"], "9102 to 9104, .* --health-port takes"),
        (["metrics-port", "9100", "http-port", "9102"], "9100 to 9102, but --http-port takes 9102"),
        (["health-port", "7998"], "7998 to 8000, but --http-port takes 8000"),
        (["health-port", "50050", "listen", "h:50051"], "but --listen takes 50051"),
        (["http-port", "50051", "listen", "h:50051"], "takes 50051, but --listen takes 50051"),
    ],
)
def test_a_port_that_is_wanted_twice_is_refused(ports: list[str], said: str) -> None:
    args = [f"--{name}={port}" for name, port in zip(ports[::2], ports[1::2], strict=True)]
    with pytest.raises(ConfigurationError, match=f"--{ports[0]}: .*{said}"):
        load("--processes", "3", *args)


def test_ports_side_by_side_or_picked_are_taken() -> None:
    load("--processes", "3", "--metrics-port", "9100", "--health-port", "9103")
    load("--processes", "3", "--metrics-port", "0", "--health-port", "0", "--http-port", "0")
    load("--processes", "3", "--metrics-port", "7998", "--no-http")


def test_the_port_file_has_the_metrics_of_all() -> None:
    found = ports_of(
        [{"address": "h:1", "metrics_address": "h:2"}, {"address": "h:1", "metrics_address": "h:3"}]
    )
    assert json.loads(json.dumps(found)) == {
        "address": "h:1",
        "metrics_address": "h:2",
        "metrics_addresses": ["h:2", "h:3"],
    }


def test_a_reserved_port_is_shared_by_who_says_so_alone() -> None:
    with reserve("127.0.0.1", 0, "--listen") as held:
        port = held.getsockname()[1]
        with socket.socket() as sharing:
            sharing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sharing.bind(("127.0.0.1", port))
            sharing.listen()
            with pytest.raises(ConfigurationError, match="--http-port: cannot bind"):
                reserve("127.0.0.1", port, "--http-port")

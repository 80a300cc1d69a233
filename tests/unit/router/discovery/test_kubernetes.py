"""When slices are listed and watched, against an API that does as the test says. No sleeps."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest
from lightkube.resources.discovery_v1 import EndpointSlice

from router.discovery import kubernetes
from router.discovery.endpoint_slices import Endpoint, Slice
from router.discovery.kubernetes import Change, KubernetesApi, KubernetesDiscovery, Listed
from router.discovery.source import Targets
from router.discovery_settings import KubernetesSource
from tests.unit.router.discovery.scripted import ScriptIsOverError, told_by

Step = Listed | Exception | Sequence[Change | Exception | float]


def decode(*hosts: str) -> Slice:
    return Slice("d-1", "decode", 1, tuple(Endpoint(host, True, False) for host in hosts))


def targets(*hosts: str) -> Targets:
    return Targets(decode=frozenset(f"{host}:1" for host in hosts), has_prefill_pool=False)


def listed(*hosts: str, version: str = "1") -> Listed:
    return Listed(version, (decode(*hosts),))


class World:
    """The script's steps answer in turn: a list, or what a watch says until it ends.

    A number is a time in which it says nothing, s.
    """

    def __init__(self, *script: Step) -> None:
        self.script = list(script)
        self.asked: list[str] = []
        self.pauses: list[float] = []
        self.now_s = 0.0
        self.is_closed = False
        self.discovery = KubernetesDiscovery(
            KubernetesSource(decode=["decode"], relist_s=100.0),
            api=self,
            clock=lambda: self.now_s,
            sleep=self._sleep,
        )

    async def list(self) -> Listed:
        self.asked.append("list")
        step = self._next()
        if isinstance(step, Exception):
            raise step
        assert isinstance(step, Listed)
        return step

    async def watch(self, version: str) -> AsyncGenerator[Change, None]:
        self.asked.append(f"watch {version}")
        step = self._next()
        assert not isinstance(step, Listed | Exception)
        for each in step:
            if isinstance(each, Exception):
                raise each
            if isinstance(each, float):
                self.now_s += each
            else:
                yield each

    async def close(self) -> None:
        self.is_closed = True

    def _next(self) -> Step:
        if not self.script:
            raise ScriptIsOverError
        return self.script.pop(0)

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds

    async def told(self) -> Sequence[Targets]:
        told = await told_by(self.discovery)
        assert self.is_closed
        return told


def changed(*hosts: str) -> Change:
    return Change(decode(*hosts), is_deleted=False)


DELETED = Change(decode(), is_deleted=True)


async def test_a_watch_goes_on_from_the_list_and_only_changes_are_told() -> None:
    world = World(listed("a", version="7"), [changed("a"), changed("a", "b"), changed("b")])
    assert await world.told() == [targets("a"), targets("a", "b"), targets("b")]
    assert world.asked == ["list", "watch 7", "list"]


async def test_nothing_is_told_before_a_list() -> None:
    world = World(RuntimeError("403"), Listed("1", ()), [DELETED])
    assert await world.told() == [targets()]
    assert world.asked[:3] == ["list", "list", "watch 1"]


@pytest.mark.parametrize("end", [[RuntimeError("410 Gone")], []], ids=["error", "end"])
async def test_after_a_watch_that_ends_all_are_listed_anew(end: list[Exception]) -> None:
    """With what was missed meanwhile."""
    world = World(listed("a"), [changed("a", "b"), *end], listed("c", version="9"), [])
    assert await world.told() == [targets("a"), targets("a", "b"), targets("c")]
    assert world.asked[:4] == ["list", "watch 1", "list", "watch 9"]
    assert world.pauses == [0.5] * len(end)


async def test_ten_minutes_down_change_nothing_but_the_age(
    caplog: pytest.LogCaptureFixture,
) -> None:
    down = ConnectionError("refused")
    world = World(listed("a"), [changed("a", "b"), down], *(62 * [down]))
    assert await world.told() == [targets("a"), targets("a", "b")]
    assert world.pauses[:6] == [0.5, 0.5, 1.0, 2.0, 4.0, 8.0]
    assert set(world.pauses[6:]) == {10.0}
    assert world.discovery.age_s == world.now_s > 570.0
    assert [record.levelname for record in caplog.records] == ["WARNING"], "told of once"


async def test_after_a_list_that_came_the_next_one_that_fails_is_soon_asked_for_again() -> None:
    """However long the API was down before."""
    down = ConnectionError("refused")
    world = World(*(5 * [down]), listed("a"), [], down, listed("b"), [])
    assert await world.told() == [targets("a"), targets("b")]
    assert world.pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 0.5]


@pytest.mark.parametrize(
    "watch", [[20.0], [30.0, changed("a"), 20.0], [30.0, changed("b"), 20.0]], ids=str
)
async def test_its_age_is_since_the_last_list_or_event(watch: list[Change | float]) -> None:
    """The world begins and ends with a pause of half a second."""
    down = ConnectionError("refused")
    world = World(down, listed("a"), [*watch, down])
    await world.told()
    assert world.pauses == [0.5, 0.5]
    assert world.discovery.age_s == 20.5


async def test_a_list_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "_LIST_S", 0.01)
    world = World(listed("a"), [])
    answer, num_asked = world.list, 0

    async def list_() -> Listed:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 1:
            await asyncio.Event().wait()
        return await answer()

    monkeypatch.setattr(world, "list", list_)
    assert await world.told() == [targets("a")]
    assert world.pauses == [0.5]


async def test_where_watches_are_refused_lists_are_rare_and_it_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refused = [RuntimeError("429 too many requests")]
    script: list[Step] = []
    for _ in range(7):
        script += [listed("a"), refused]
    world = World(*script, listed("a"), [changed("b"), *refused], listed("b"), refused)
    assert await world.told() == [targets("a"), targets("b")]
    assert world.pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 0.5, 1.0]
    levels = [record.levelname for record in caplog.records]
    assert levels == ["WARNING"] * 2, "and once more, as watches worked meanwhile"


async def test_a_watch_that_stood_for_long_was_not_refused() -> None:
    cut = RuntimeError("cut")
    script: list[Step] = []
    watches: list[Step] = [[cut], [cut], [20.0, cut], [cut]]
    for ends in watches:
        script += [listed("a"), ends]
    world = World(*script)
    assert await world.told() == [targets("a")]
    assert world.pauses == [0.5, 1.0, 0.5, 1.0]


async def test_however_much_is_heard_all_are_listed_in_time() -> None:
    world = World(listed("a"), [changed("b"), changed("not heard")], listed("c"), [])
    told: list[Targets] = []
    with contextlib.suppress(ScriptIsOverError):
        async for each in world.discovery.targets():
            told.append(each)
            world.now_s += 50.0
    assert told == [targets("a"), targets("b"), targets("c")]
    assert world.asked[:3] == ["list", "watch 1", "list"]


def raw(
    metadata: dict[str, object], endpoint: dict[str, object], port: dict[str, object]
) -> dict[str, object]:
    """A slice as the API server writes it, with other values here and there."""
    return {
        "metadata": {"name": "d-1", "labels": {"kubernetes.io/service-name": "decode"}, **metadata},
        "addressType": "IPv4",
        "endpoints": [{"addresses": ["10.0.0.1"], **endpoint}],
        "ports": [{"name": "grpc", "port": 1, **port}],
    }


class Client:
    """In lightkube's place: the next list, and watches that say nothing."""

    def __init__(self, *lists: dict[str, object]) -> None:
        self._lists = list(lists)

    def list(self, *_: object, **__: object) -> Any:
        if not self._lists:
            raise ScriptIsOverError
        slices: list[Any] = [EndpointSlice.from_dict(self._lists.pop(0))]

        class Answer:
            resourceVersion = "1"  # noqa: N815 - lightkube's name

            async def __aiter__(self) -> AsyncGenerator[Any, None]:
                for each in slices:
                    yield each

        return Answer()

    async def watch(self, *_: object, **__: object) -> AsyncGenerator[Any, None]:
        return
        yield

    async def close(self) -> None:
        pass


async def told_of(tmp_path: Path, *lists: dict[str, object]) -> Sequence[Targets]:
    """What the API server's own answers come to."""
    config = {
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": {}}],
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
        "current-context": "c",
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    source = KubernetesSource(decode=["decode"], kubeconfig=tmp_path / "kubeconfig")
    api = KubernetesApi(source)
    client: Any = Client(*lists)
    api._client = client
    world = World()
    world.discovery = KubernetesDiscovery(
        source, api=api, clock=lambda: world.now_s, sleep=world._sleep
    )
    return await told_by(world.discovery)


@pytest.mark.parametrize(
    ("metadata", "endpoint", "port"),
    [
        ({"labels": {"kubernetes.io/service-name": ["decode"]}}, {}, {}),
        ({"name": ["d-1"]}, {}, {}),
        ({}, {"addresses": [5]}, {}),
        ({}, {"addresses": [None]}, {}),
        ({}, {"addresses": [""]}, {}),
        ({}, {"addresses": ["10.0.0.1\n evil"]}, {}),
        ({}, {"addresses": ["unix"]}, {}),
        ({}, {"zone": ["a"]}, {}),
        ({}, {"zone": 7}, {}),
        ({}, {}, {"port": "abc"}),
        ({}, {}, {"port": 99999999}),
        ({}, {}, {"port": -1}),
        ({}, {}, {"name": ["grpc"]}),
    ],
)
async def test_a_slice_that_is_not_as_its_api_says_changes_nothing(
    tmp_path: Path,
    metadata: dict[str, object],
    endpoint: dict[str, object],
    port: dict[str, object],
) -> None:
    good, other = raw({}, {}, {}), raw({}, {"addresses": ["10.0.0.2"]}, {})
    told = await told_of(tmp_path, good, raw(metadata, endpoint, port), other)
    assert told == [targets("10.0.0.1"), targets("10.0.0.2")]


async def test_an_endpoint_that_ends_stays_and_one_that_is_not_ready_goes(tmp_path: Path) -> None:
    ending: dict[str, object] = {
        "conditions": {"ready": False, "serving": True, "terminating": True}
    }
    unready: dict[str, object] = {
        "conditions": {"ready": False, "serving": False, "terminating": False}
    }
    there, other = raw({}, {}, {}), raw({}, {"addresses": ["10.0.0.2"]}, {})
    told = await told_of(tmp_path, there, raw({}, ending, {}), other)
    assert told == [targets("10.0.0.1"), targets("10.0.0.2")]
    told = await told_of(tmp_path, raw({}, ending, {}), other)
    assert told == [targets(), targets("10.0.0.2")], "it was not used"
    assert await told_of(tmp_path, there, raw({}, unready, {})) == [targets("10.0.0.1"), targets()]

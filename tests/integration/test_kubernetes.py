"""Endpoints from a Kubernetes API server over HTTP: whatever it does, the set becomes the truth."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from router.discovery.kubernetes import KubernetesApi, KubernetesDiscovery
from router.discovery.source import Targets
from router.discovery_settings import KubernetesSource
from router.placement.place import Place
from tests.integration.kube_api import KubeApi, kube_api
from tests.integration.router_rig import eventually


class Following:
    """What a discovery has told."""

    def __init__(self) -> None:
        self.told: list[Targets] = []

    async def until(self, *decode: str) -> None:
        """Wait until the decode workers are these."""
        wanted = frozenset(decode)
        await eventually(
            lambda: bool(self.told) and self.told[-1].decode == wanted,
            f"never {sorted(wanted)}: {self.told[-1:]}",
        )


@asynccontextmanager
async def following(
    tmp_path: Path, *, relist_s: float = 60.0
) -> AsyncIterator[tuple[KubeApi, Following]]:
    """A server with one decode worker, and a discovery that has found it."""
    async with kube_api(tmp_path) as (api, config):
        await api.put("d-1", "decode", 50051, "10.0.0.1")
        source = KubernetesSource(
            prefill=["prefill"], decode=["decode"], kubeconfig=config, relist_s=relist_s
        )
        discovery = KubernetesDiscovery(source, api=KubernetesApi(source), clock=time.monotonic)
        seen = Following()

        async def follow() -> None:
            async for each in discovery.targets():
                seen.told.append(each)

        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(follow())
            try:
                await seen.until("10.0.0.1:50051")
                await eventually(lambda: api.num_watches == 1, "no watch")
                yield api, seen
            finally:
                task.cancel()


async def test_what_comes_and_goes_is_followed(tmp_path: Path) -> None:
    async with following(tmp_path) as (api, seen):
        await api.put("d-1", "decode", 50051, "10.0.0.1", "10.0.0.2")
        await seen.until("10.0.0.1:50051", "10.0.0.2:50051")
        await api.put("d-2", "decode", 50052, "10.0.0.3")
        await api.put("p-1", "prefill", 50053, "10.0.0.9")
        await api.put("d-1", "decode", 50051)
        await api.delete("d-1")
        await seen.until("10.0.0.3:50052")
        await eventually(lambda: seen.told[-1].prefill == {"10.0.0.9:50053"}, "no prefill worker")
        await api.put("d-2", "decode", 50052, "10.0.0.3", ready=False)
        await seen.until()
        assert api.num_lists == 1, "all by the watch"
        assert api.selectors == {"kubernetes.io/service-name in (decode,prefill)"}


async def test_a_slice_that_is_deleted_counts_until_all_are_listed_anew(tmp_path: Path) -> None:
    async with following(tmp_path) as (api, seen):
        await api.delete("d-1")
        await api.put("d-2", "decode", 50052, "10.0.0.2")
        await seen.until("10.0.0.1:50051", "10.0.0.2:50052")
        assert api.num_lists == 1
        api.forget()  # what the watch would go on from
        api.end()
        await seen.until("10.0.0.2:50052")
        assert api.num_lists == 2


async def missed_and_gone(api: KubeApi) -> None:
    """The watch ends, and when it is begun again what it would go on from is gone."""
    api.is_mute = True
    await api.put("d-1", "decode", 50051, "10.0.0.2")
    api.forget()
    api.is_mute = False
    api.end()
    await eventually(lambda: api.num_gone == 1, "no watch began again")


async def cut_while_something_happens(api: KubeApi) -> None:
    api.cut()
    await api.put("d-1", "decode", 50051, "10.0.0.2")


async def down_for_a_while(api: KubeApi) -> None:
    api.is_down = True
    api.cut()
    await api.put("d-1", "decode", 50051, "10.0.0.2")
    await eventually(lambda: api.num_refused >= 1, "it was not asked")
    api.is_down = False


@pytest.mark.parametrize(
    "trouble", [missed_and_gone, cut_while_something_happens, down_for_a_while]
)
async def test_after_trouble_all_are_listed_anew(
    tmp_path: Path, trouble: Callable[[KubeApi], Coroutine[None, None, None]]
) -> None:
    async with following(tmp_path) as (api, seen):
        await trouble(api)
        await seen.until("10.0.0.2:50051")
        assert api.num_lists >= 2
        assert seen.told == [_one("10.0.0.1:50051"), _one("10.0.0.2:50051")], "nothing in between"


async def test_what_no_watch_told_is_found_by_the_timer(tmp_path: Path) -> None:
    async with following(tmp_path, relist_s=0.2) as (api, seen):
        api.is_mute = True
        await api.delete("d-1")
        await seen.until()


async def test_a_watch_that_just_ends_goes_on_from_where_it_was(tmp_path: Path) -> None:
    async with following(tmp_path) as (api, seen):
        await api.put("d-1", "decode", 50051, "10.0.0.2")
        await seen.until("10.0.0.2:50051")
        api.end()
        await api.put("d-1", "decode", 50051, "10.0.0.3")
        await seen.until("10.0.0.3:50051")
        assert (api.num_lists, api.num_gone) == (1, 0)


async def test_watches_that_end_at_once_are_opened_once_a_second(tmp_path: Path) -> None:
    now_s, pauses = 100.0, list[float]()

    async def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds
        pauses.append(seconds)
        if len(pauses) > 4:
            await asyncio.Event().wait()

    async with kube_api(tmp_path) as (api, config):
        await api.put("d-1", "decode", 50051, "10.0.0.1")
        api.ends_watches = True
        source = KubernetesSource(decode=["decode"], kubeconfig=config)
        asked = KubernetesApi(source, clock=lambda: now_s, sleep=sleep)
        version = (await asked.list()).version

        async def watch() -> None:
            async for _ in asked.watch(version):
                pass

        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch())
            await eventually(lambda: len(pauses) > 4, "watches were not opened again")
            watching.cancel()
        await asked.close()
    assert (api.num_watches, pauses) == (4, [0.0, 1.0, 1.0, 1.0, 1.0])


def _one(address: str) -> Targets:
    place = Place(f"zone of {address.partition(':')[0]}")
    return Targets(decode=frozenset({address}), places={address: place})

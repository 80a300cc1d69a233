"""values-cpu as a cluster of this machine: found by EndpointSlices, scaled, rolled out under load.

With the demo model, which is fetched if it is not in the user's cache.
"""

import re
from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest
import pytest_asyncio

from diptych.client import DiptychClient
from tests.deploy.helm import HELM_4, template
from tests.deploy.load import ask, decoded_on, eventually, load, prefilled_on, routers_know
from tests.deploy.local_cluster import LocalCluster, local_cluster
from tests.trace_collector import Collector, collecting
from tests.unit.deploy.chart import VALUES, parsed

pytestmark = [pytest.mark.timeout(1200), pytest.mark.asyncio(loop_scope="module")]


class Traced(NamedTuple):
    """Where all processes send their spans."""

    collector: Collector
    endpoint: str


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def traced() -> AsyncIterator[Traced]:
    async with collecting() as (collector, endpoint):
        yield Traced(collector, endpoint)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    traced: Traced, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LocalCluster]:
    """Nothing is traced by chance: what is traced, somebody asked for."""
    values = f"tracing.endpoint={traced.endpoint},router.settings.trace_sample_ratio=0"
    manifests = parsed(template(HELM_4, VALUES["cpu"], f"--set={values}"))
    async with local_cluster(manifests, tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


async def test_all_probes_pass_and_every_worker_is_found(cluster: LocalCluster) -> None:
    for running in cluster.running.values():
        assert len(running) == 2
        for pod in running:
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                assert await pod.passes(probe), f"{pod.name}: {probe}"
    for role in ("prefill", "decode"):
        await routers_know(cluster.running[cluster.router.name], role, 2)


async def test_helm_test_passes_each_time(cluster: LocalCluster, traced: Traced) -> None:
    services = {"diptych-router", "diptych-prefill", "diptych-decode"}
    for _ in range(2):
        done = await cluster.test()
        assert done.returncode == 0, done.stderr
        assert "KV pulled" in done.stderr
        said = re.search("router, prefill, decode sent spans of trace ([0-9a-f]{32})", done.stderr)
        assert said, done.stderr

        async def arrived(trace_id: str = said[1]) -> bool:
            return traced.collector.senders(trace_id) == services

        await eventually(arrived, "all of them sent spans of that trace")


async def test_more_and_fewer_workers_are_followed(cluster: LocalCluster) -> None:
    group = cluster.group("decode")
    async with load(cluster.address, num_clients=4) as answers:
        await cluster.scale(group.name, 3)
        await routers_know(cluster.running[cluster.router.name], "decode", 3)
        (new,) = [pod for pod in cluster.running[group.name] if pod.name.endswith("-2")]

        async def is_used() -> bool:
            return new.address in decoded_on(answers)

        await eventually(is_used, "the new worker decodes")
        await cluster.scale(group.name, 2)
        await routers_know(cluster.running[cluster.router.name], "decode", 2)
        num_before = len(answers)
    assert new.address not in decoded_on(answers[num_before + 4 :]), "four were under way"


@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
async def test_a_rollout_drops_no_request(cluster: LocalCluster, role: str) -> None:
    group = cluster.group(role)
    before = {pod.address for pod in cluster.running[group.name]}
    async with load(cluster.address) as answers:
        await cluster.roll_out(group.name)
    after = {pod.address for pod in cluster.running[group.name]}
    assert len(after) == len(before) == 2
    assert not before & after
    used = {"prefill": prefilled_on, "decode": decoded_on}.get(role)
    assert prefilled_on(answers), "prompts were shipped"
    if used is not None:
        assert used(answers) & before
        assert used(answers) & after
    async with DiptychClient(cluster.address, retries=0) as client:
        for answer in (answers[0], answers[-1]):
            assert (await ask(client, answer.prompt)).text == answer.text


async def test_helm_test_passes_after_all_of_it(cluster: LocalCluster) -> None:
    done = await cluster.test()
    assert done.returncode == 0, done.stderr


async def test_everything_ends_within_its_grace_period(cluster: LocalCluster) -> None:
    """The last: nothing runs after it."""
    assert set((await cluster.end()).values()) == {0}

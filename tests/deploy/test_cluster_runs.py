"""values-cpu as a cluster of this machine: found by EndpointSlices, scaled, rolled out under load.

With the demo model, which is fetched if it is not in the user's cache.
"""

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import pytest
import pytest_asyncio

from diptych.client import Chunk, DiptychClient, FinishReason, SamplingOptions
from tests.deploy.helm import HELM_4, template
from tests.deploy.local_cluster import LocalCluster, local_cluster, metric
from tests.trace_collector import Collector, collecting
from tests.unit.deploy.chart import VALUES, parsed

pytestmark = [pytest.mark.timeout(1200), pytest.mark.asyncio(loop_scope="module")]

_WITHIN_S = 180.0
_OPTIONS = SamplingOptions(max_tokens=8, ignore_eos=True)
_NUMBERS = itertools.count()


class Answer(NamedTuple):
    """What one request brought."""

    prompt: str
    text: str
    last: Chunk


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


async def ask(client: DiptychClient, prompt: str | None = None) -> Answer:
    """One answer to a prompt that is new and long enough to be shipped; whole, or an error."""
    if prompt is None:
        prompt = f"Number {next(_NUMBERS)}. " + "A door opens and somebody comes in. " * 12
    parts = [chunk async for chunk in client.generate(prompt, options=_OPTIONS, timeout_s=90)]
    assert parts[-1].finish_reason is FinishReason.LENGTH
    assert sum(len(part.token_ids) for part in parts) == _OPTIONS.max_tokens
    return Answer(prompt, "".join(part.text for part in parts), parts[-1])


async def eventually(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    try:
        async with asyncio.timeout(_WITHIN_S):
            while not await holds():
                await asyncio.sleep(0.2)
    except TimeoutError:
        raise AssertionError(f"not within {_WITHIN_S} s: {what}") from None


async def routers_know(cluster: LocalCluster, role: str, number: int) -> None:
    async def know() -> bool:
        routers = cluster.running[cluster.router.name]
        known = [await metric(r, "diptych_router_workers_ready", role=role) for r in routers]
        return known == [number] * len(routers)

    await eventually(know, f"every router knows {number} {role} workers")


@asynccontextmanager
async def load(cluster: LocalCluster, num_clients: int = 2) -> AsyncIterator[list[Answer]]:
    """Clients that ask without a pause, and never twice for the same answer.

    At least four requests are answered before the body runs, and four after it.
    """
    answers: list[Answer] = []
    is_over = asyncio.Event()

    async def ask_on() -> None:
        async with DiptychClient(cluster.address, retries=0) as client:
            while not is_over.is_set():
                answers.append(await ask(client))

    async def more() -> None:
        wanted = len(answers) + 4

        async def are_there() -> bool:
            return len(answers) >= wanted

        await eventually(are_there, "requests are answered")

    async with asyncio.TaskGroup() as tasks:
        for _ in range(num_clients):
            tasks.create_task(ask_on())
        await more()
        yield answers
        await more()
        is_over.set()


def decoded_on(answers: list[Answer]) -> set[str]:
    return {answer.last.timing.decode_worker for answer in answers if answer.last.timing}


def prefilled_on(answers: list[Answer]) -> set[str]:
    return {answer.last.timing.prefill_worker for answer in answers if answer.last.timing} - {""}


async def test_all_probes_pass_and_every_worker_is_found(cluster: LocalCluster) -> None:
    for running in cluster.running.values():
        assert len(running) == 2
        for pod in running:
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                assert await pod.passes(probe), f"{pod.name}: {probe}"
    for role in ("prefill", "decode"):
        await routers_know(cluster, role, 2)


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
    async with load(cluster, num_clients=4) as answers:
        await cluster.scale(group.name, 3)
        await routers_know(cluster, "decode", 3)
        (new,) = [pod for pod in cluster.running[group.name] if pod.name.endswith("-2")]

        async def is_used() -> bool:
            return new.address in decoded_on(answers)

        await eventually(is_used, "the new worker decodes")
        await cluster.scale(group.name, 2)
        await routers_know(cluster, "decode", 2)
        num_before = len(answers)
    assert new.address not in decoded_on(answers[num_before + 4 :]), "four were under way"


@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
async def test_a_rollout_drops_no_request(cluster: LocalCluster, role: str) -> None:
    group = cluster.group(role)
    before = {pod.address for pod in cluster.running[group.name]}
    async with load(cluster) as answers:
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

"""A router is told to stop while clients that try nothing twice ask on; another one stays."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import httpx

from tests.call import generate, token_request
from tests.cluster import Process, as_args
from tests.deploy.service_address import service_address
from tests.integration.fake_workers import FakeDecode, FakePrefill
from tests.integration.router_rig import PROMPT, expected
from tests.waiting import until

NUM_TOKENS = 3
SOON_S = 60.0
ALONE = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
# Of a call that was not yet on the wire when its connection came of age: gRPC places it anew by
# itself, unless it was told to try nothing twice. The end of a server has another text.
NEVER_SENT = "Stream removed (GOAWAY received; Error code: 0; Debug Text: max_age)"
# gRPC's own way to look away from a server that says it is not ready.
BY_HEALTH = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "healthCheckConfig": {"serviceName": "diptych.v1.Inference"},
}


@asynccontextmanager
async def two_routers(model: Path, folder: Path) -> AsyncIterator[list[Process]]:
    """Both ready, each with two workers of its own."""
    async with AsyncExitStack() as ending:
        routers = []
        for index in range(2):
            flags = {"model": str(model), "max-connection-age-s": "1"}
            for worker in (FakePrefill(), FakeDecode()):
                await worker.start()
                ending.push_async_callback(worker.kill)
                flags["prefill" if isinstance(worker, FakePrefill) else "decode"] = worker.address
            routers.append(Process("router", f"router-{index}", folder, as_args(flags)))
            routers[-1].start()
            ending.push_async_callback(asyncio.to_thread, routers[-1].stop)
        for router in routers:
            await asyncio.to_thread(router.wait_listening)
            async with asyncio.timeout(SOON_S):
                while not await is_ready(router):
                    await asyncio.sleep(0.05)
        yield routers


async def is_ready(router: Process) -> bool:
    async with httpx.AsyncClient() as client:
        return (await client.get(f"http://{router.http_address}/health")).status_code == 200


@asynccontextmanager
async def by_grpc(
    address: str, *options: tuple[str, str]
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """One request and its answer, over one channel."""
    async with grpc.aio.insecure_channel(address, options=[*ALONE, *options]) as channel:

        async def ask() -> None:
            request = token_request(PROMPT, max_tokens=NUM_TOKENS)
            answer = await generate(channel, request)
            while answer.error is not None and answer.error.message.startswith(NEVER_SENT):
                answer = await generate(channel, request)
            if answer.error is not None:
                raise answer.error
            assert answer.token_ids == expected(NUM_TOKENS)

        yield ask


@asynccontextmanager
async def by_http(address: str, model: str) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """The same, over connections that are kept."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=SOON_S) as client:

        async def ask() -> None:
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == NUM_TOKENS

        yield ask


async def test_no_request_fails_of_clients_that_ask_all_the_while(
    wide_model: Path, tmp_path: Path
) -> None:
    """One address before both, as a cluster's service; and by health, where a client has both."""
    async with two_routers(wide_model, tmp_path) as (leaving, staying):
        await ask_while_one_leaves(leaving, staying, wide_model.name)
    assert "refused" not in leaving.log_path.read_text()


async def ask_while_one_leaves(leaving: Process, staying: Process, model: str) -> None:
    async with (
        service_address("127.0.0.1", 0) as service,
        service_address("127.0.0.1", 0) as web,
        by_grpc(service.address) as one,
        by_grpc(service.address) as other,
        by_grpc(
            f"ipv4:{leaving.address},{staying.address}",
            ("grpc.service_config", json.dumps(BY_HEALTH)),
        ) as by_health,
        by_http(web.address, model) as over_http,
        asyncio.TaskGroup() as tasks,
    ):
        service.pods = [leaving.address, staying.address]
        web.pods = [leaving.http_address, staying.http_address]
        answered: Counter[str] = Counter()
        is_over = False

        async def ask_on(name: str, ask: Callable[[], Awaitable[None]]) -> None:
            while not is_over:
                await ask()
                answered[name] += 1

        async def more() -> None:
            before = answered.copy()
            await until(
                lambda: all(answered[name] >= before[name] + 20 for name in asking),
                SOON_S,
                "requests are answered",
            )

        asking = {"one": one, "other": other, "by health": by_health, "http": over_http}
        for name, ask in asking.items():
            tasks.create_task(ask_on(name, ask))
        await more()
        service.pods, web.pods = [staying.address], [staying.http_address]
        leaving.ask_to_end()
        assert await asyncio.to_thread(leaving.wait_ended) == 0
        await more()
        is_over = True

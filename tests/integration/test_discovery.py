"""A router follows its source of workers while it serves."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from diptych.rpc.channel import open_channel
from router.app import serve
from router.config import RouterConfig
from tests.call import generate, token_request
from tests.integration.fake_workers import FakeDecode
from tests.integration.router_rig import EVENTUALLY_S, PROMPT, TIMERS, expected


@asynccontextmanager
async def serving(model: Path, **settings: object) -> AsyncIterator[grpc.aio.Channel]:
    """A router with these settings."""
    config = RouterConfig.model_validate({"model": str(model), "timers": TIMERS, **settings})
    stop, port = asyncio.Event(), asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve(config, stop, port.set_result))
        async with open_channel(f"127.0.0.1:{await port}") as channel:
            yield channel
        stop.set()


@asynccontextmanager
async def two_workers() -> AsyncIterator[tuple[FakeDecode, FakeDecode]]:
    """Decode workers, which compute prompts themselves."""
    first, second = FakeDecode(), FakeDecode()
    for worker in (first, second):
        await worker.start()
    yield first, second
    for worker in (first, second):
        await worker.kill()


async def answers_from(channel: grpc.aio.Channel, worker: FakeDecode) -> None:
    """Ask until this one was asked; every answer on the way is right."""
    async with asyncio.timeout(EVENTUALLY_S):
        while not worker.specs:
            request = token_request(PROMPT, max_tokens=4)
            answer = await generate(channel, request, timeout_s=EVENTUALLY_S)
            assert answer.error is None
            assert answer.token_ids == expected(4)


async def test_a_file_that_is_replaced_moves_requests(wide_model: Path, tmp_path: Path) -> None:
    async with two_workers() as (first, second):
        path = tmp_path / "workers.json"

        def name(worker: FakeDecode) -> None:
            beside = tmp_path / "new"
            beside.write_text(json.dumps({"decode": [worker.address]}))
            beside.replace(path)

        name(first)
        source = {"path": path, "interval_s": 0.02}
        async with serving(wide_model, discovery="file", file=source) as channel:
            await answers_from(channel, first)
            path.write_text("decode: [")
            await asyncio.sleep(0.1)
            first.specs.clear()
            await answers_from(channel, first)
            name(second)
            await answers_from(channel, second)

"""Batches through real processes by OpenAI's own client; batch server and router are killed."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from hypothesis import settings
from openai.types import Batch

from tests.cluster import Cluster, Process, another_router, as_args, running_cluster
from tests.waiting import until

IS_LONG = settings.get_current_profile_name() == "long"
NUM_LINES = 2000 if IS_LONG else 16
NUM_TOKENS = 24 if IS_LONG else 100
NUM_KILLS = 12 if IS_LONG else 1  # of the batch server
NUM_AT_ONCE = 8 if IS_LONG else 2
PATIENCE_S = 900 if IS_LONG else 60
CHAT = "/v1/chat/completions"
ROUTER_FLAGS = {"local-prefill-below-tokens": "0"}
ENDED = ("failed", "completed", "expired", "cancelled")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def cluster(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(
        tmp_path_factory.mktemp("batches"),
        str(tiny_llama),
        worker_flags={"num-blocks": "64", "max-model-len": "256"},
        router_flags=ROUTER_FLAGS,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> str:
    return tiny_llama.name


@pytest.fixture(scope="module")
def doomed(
    cluster: Cluster, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Process]:
    """A second router, which is asked first, until it is killed."""
    work = tmp_path_factory.mktemp("doomed")
    with another_router(cluster, work, tiny_llama, ROUTER_FLAGS) as other:
        yield other.router


@pytest.fixture(scope="module")
def server(
    cluster: Cluster, doomed: Process, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Process]:
    work = tmp_path_factory.mktemp("server")
    flags = {"database": f"sqlite:///{work / 'batch.sqlite'}", "max-concurrent": str(NUM_AT_ONCE)}
    args = as_args(flags)
    for router in (doomed, cluster.router):
        args += ["--router", f"http://{router.http_address}"]
    process = Process("batch_server", "batch-server", work, args)
    process.start()
    process.wait_listening()
    yield process
    assert process.stop() == 0, process.log_tail()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    await cluster.wait_ready()
    url = f"http://{cluster.router.http_address}"
    async with httpx.AsyncClient(base_url=url, timeout=60) as opened:
        yield opened


def client_of(server: Process) -> openai.AsyncOpenAI:
    url = f"http://{server.http_address}/v1"
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)


def file_of(path: str, bodies: dict[str, dict[str, Any]]) -> bytes:
    lines = (
        {"custom_id": name, "method": "POST", "url": path, "body": body}
        for name, body in bodies.items()
    )
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


async def submit(client: openai.AsyncOpenAI, path: Any, bodies: dict[str, Any]) -> Batch:
    content = ("in.jsonl", file_of(path, bodies))
    uploaded = await client.files.create(file=content, purpose="batch")
    return await client.batches.create(
        input_file_id=uploaded.id,
        endpoint=path,
        completion_window="24h",
        metadata={"of": "a test"},
    )


async def wait_for(
    client: openai.AsyncOpenAI, batch: Batch, condition: Callable[[Batch], bool]
) -> Batch:
    """The batch once that holds; it has to hold before the batch has ended."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition(batch):
            assert batch.status not in ENDED, batch
            await asyncio.sleep(0.02)
            batch = await client.batches.retrieve(batch.id)
    return batch


def num_done(batch: Batch) -> int:
    assert batch.request_counts is not None
    return batch.request_counts.completed


def has_done(least: int, batch: Batch) -> bool:
    return num_done(batch) >= least


async def lines_of(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    content = await client.files.content(file_id)
    return [json.loads(line) for line in content.text.splitlines()]


def chats(model: str) -> dict[str, dict[str, Any]]:
    """Some say their seed, some draw none; one is wrong."""
    made: dict[str, dict[str, Any]] = {}
    for number in range(NUM_LINES):
        message = {"role": "user", "content": f"The small river carries letter {number}"}
        sampled = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0}
        body = {
            "model": model,
            "messages": [message],
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            **sampled,
        }
        made[f"line-{number}"] = body
    made["wrong"] = {**made["line-0"], "temperature": -1}
    return made


async def keep_asking(http: httpx.AsyncClient, body: dict[str, Any], answers: list[Any]) -> None:
    """Online traffic beside a batch, until it is cancelled."""
    while True:
        answered = await http.post(CHAT, json=body)
        assert answered.status_code == 200, answered.text
        answers.append(answered.json()["choices"])


async def kill_and_restart(process: Process) -> None:
    process.kill()
    process.start()
    await asyncio.to_thread(process.wait_listening)


async def test_what_is_killed_neither_loses_nor_repeats_a_line(
    server: Process, doomed: Process, http: httpx.AsyncClient, model: str
) -> None:
    """Every line once, and exact; so is every answer to those who ask meanwhile."""
    bodies = chats(model)
    online = {**bodies["line-1"], "max_tokens": 8}
    answers: list[Any] = []
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(keep_asking(http, online, answers))
        batch = await through_kills(server, doomed, bodies)
        asking.cancel()
    assert len(answers) > NUM_KILLS
    assert all(each == answers[0] for each in answers)
    async with client_of(server) as client:
        batch = await wait_for(client, batch, lambda seen: seen.status in ENDED)
        output = await lines_of(client, batch.output_file_id)
        (wrong,) = await lines_of(client, batch.error_file_id)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {
        "total": NUM_LINES + 1,
        "completed": NUM_LINES,
        "failed": 1,
    }
    assert [line["custom_id"] for line in output] == [name for name in bodies if name != "wrong"]
    assert (wrong["custom_id"], wrong["response"]["status_code"]) == ("wrong", 400)
    assert wrong["response"]["body"]["error"]["param"] == "temperature"
    room = asyncio.Semaphore(NUM_AT_ONCE)

    async def check(line: dict[str, Any]) -> None:
        async with room:
            answer = (await http.post(CHAT, json=bodies[line["custom_id"]])).json()
        made = line["response"]["body"]
        assert made["choices"] == answer["choices"]
        assert set(made) == set(answer)

    async with asyncio.TaskGroup() as tasks:
        for line in output:
            tasks.create_task(check(line))


async def through_kills(server: Process, doomed: Process, bodies: dict[str, Any]) -> Batch:
    """A batch that is in progress, after the router that is asked first was killed, and the
    batch server again and again."""
    async with client_of(server) as client:
        batch = await submit(client, CHAT, bodies)
        batch = await wait_for(client, batch, lambda seen: num_done(seen) >= 2)
        doomed.kill()
    for number in range(1, NUM_KILLS + 1):
        least = 5 + NUM_LINES * (number - 1) // (NUM_KILLS + 1)
        async with client_of(server) as client:
            batch = await wait_for(client, batch, partial(has_done, least))
            assert batch.status == "in_progress"
        await kill_and_restart(server)
    return batch


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "The quiet garden opens", "temperature": 0}),
        ("/v1/embeddings", {"input": "The quiet garden opens"}),
    ],
)
async def test_other_endpoints(
    server: Process, http: httpx.AsyncClient, model: str, path: str, body: dict[str, Any]
) -> None:
    body = {"model": model, **body}
    async with client_of(server) as client:
        batch = await submit(client, path, {"only": body})
        batch = await wait_for(client, batch, lambda seen: seen.status in ENDED)
        (line,) = await lines_of(client, batch.output_file_id)
    answer = (await http.post(path, json=body)).json()
    part = "data" if path == "/v1/embeddings" else "choices"
    assert line["response"]["body"][part] == answer[part]
    assert line["response"]["body"]["usage"]["prompt_tokens"] > 0


async def test_files_and_batches_are_listed_cancelled_and_deleted(
    server: Process, model: str
) -> None:
    async with client_of(server) as client:
        batch = await submit(client, CHAT, chats(model))
        cancelled = await client.batches.cancel(batch.id)
        assert cancelled.status in ("cancelling", "cancelled")
        batch = await wait_for(client, batch, lambda seen: seen.status in ENDED)
        assert batch.status == "cancelled"
        listed = [each.id async for each in client.batches.list(limit=1)]
        assert listed[0] == batch.id
        assert len(listed) == len(set(listed)) >= 2
        files = [each async for each in client.files.list(purpose="batch", limit=1)]
        assert batch.input_file_id in {each.id for each in files}
        assert (await client.files.delete(batch.input_file_id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(batch.input_file_id)


async def test_it_tells_how_it_is(server: Process) -> None:
    await until(lambda: server.metric("diptych_batches_open") == 0, 30, "batches end")
    assert server.metric("diptych_batch_lines_sent") == 0
    assert server.metric("diptych_batch_lines_limit") >= 1

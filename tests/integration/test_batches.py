"""Batches through real processes by OpenAI's own client; batch server and router are killed."""

import asyncio
import json
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from hypothesis import settings
from openai.types import Batch

from diptych.client import BatchClient, DiptychClient, SamplingOptions
from diptych.request_class import RequestClass
from diptych.rpc.channel import open_channel
from diptych.service_level import NO_LEVEL, ServiceLevel
from diptych.v1 import batches_pb2, batches_pb2_grpc
from tests.cluster import Cluster, Process, another_router, as_args, running_cluster
from tests.golden_rule import MARGIN, Run, near_tie
from tests.notes import Note
from tests.waiting import until, within

IS_LONG = settings.get_current_profile_name() == "long"
NUM_LINES = 2000 if IS_LONG else 16
NUM_TOKENS = 24 if IS_LONG else 100
NUM_KILLS = 12 if IS_LONG else 1  # of the batch server
NUM_AT_ONCE = 8 if IS_LONG else 2
PATIENCE_S = 900 if IS_LONG else 60
MOST_NEAR = NUM_LINES // 100
MAX_HELD_TOKENS = 4
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
    async with within(PATIENCE_S):
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
    """Its gRPC port stays."""
    process.kill()
    process.start(process.address)
    await asyncio.to_thread(process.wait_listening)


async def test_what_is_killed_neither_loses_nor_repeats_a_line(
    cluster: Cluster,
    server: Process,
    doomed: Process,
    http: httpx.AsyncClient,
    model: str,
    note: Note,
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
    near = await check_exact(http, cluster.router.address, bodies, output)
    note(f"{NUM_LINES} lines, {NUM_KILLS} kills, {near} near ties decided otherwise")
    assert near <= MOST_NEAR


async def check_exact(
    http: httpx.AsyncClient,
    router: str,
    bodies: dict[str, dict[str, Any]],
    output: list[dict[str, Any]],
) -> int:
    """Each line says what a router answers to it alone; the number of those in which rounding
    decided a near tie otherwise, as it may beside others."""
    room = asyncio.Semaphore(NUM_AT_ONCE)
    num_near = 0

    async def check(line: dict[str, Any]) -> None:
        nonlocal num_near
        async with room:
            body = bodies[line["custom_id"]]
            answer = (await http.post(CHAT, json=body)).json()
            made = line["response"]["body"]
            assert set(made) == set(answer)
            if made["choices"] != answer["choices"]:
                (one,), (other,) = made["choices"], answer["choices"]
                texts = [each["message"].pop("content") for each in (one, other)]
                assert one == other
                await check_near(router, body, texts)
                num_near += 1

    async with asyncio.TaskGroup() as tasks:
        for line in output:
            tasks.create_task(check(line))
    return num_near


async def check_near(router: str, body: dict[str, Any], texts: list[str]) -> None:
    """They part where whoever answers once more is near another token, whichever it takes."""
    options = SamplingOptions(
        temperature=body["temperature"],
        seed=body.get("seed"),
        max_tokens=body["max_tokens"],
        ignore_eos=True,
        return_margins=True,
    )
    messages = [(each["role"], each["content"]) for each in body["messages"]]
    common, margins = "", list[float]()
    async with DiptychClient(router) as client:
        async for chunk in client.generate(messages=messages, options=options):
            margins += chunk.margins
            common += chunk.text
            if not all(text.startswith(common) for text in texts):
                break
    # What is held back of a character comes with a later token.
    assert min(margins[-MAX_HELD_TOKENS:]) < MARGIN, (margins, texts, common)


async def test_what_is_submitted_by_grpc_survives_a_kill_line_by_line(
    cluster: Cluster,
    server: Process,
    http: httpx.AsyncClient,
    model: str,
    tmp_path: Path,
    note: Note,
) -> None:
    """Who watches it goes on watching; of an upload that the kill cut off nothing is left."""
    bodies = chats(model)
    path = tmp_path / "in.jsonl"
    path.write_bytes(file_of(CHAT, bodies))
    async with (
        BatchClient(server.address, retries=100) as client,
        open_channel(server.address) as channel,
    ):
        made = await client.submit(path, CHAT)
        stub: Any = batches_pb2_grpc.BatchesStub(channel)
        cut_off = stub.UploadFile()
        head = batches_pb2.NewFile(filename="cut off", num_bytes=10**6)
        await cut_off.write(batches_pb2.UploadFileRequest(file=head))
        await cut_off.write(batches_pb2.UploadFileRequest(data=b"x" * 400_000))
        num_kills = 0
        async for state in client.watch(made.batch_id):
            if num_kills < NUM_KILLS and state.num_completed >= 4 * (num_kills + 1):
                assert state.status == "in_progress"
                if not num_kills:
                    await until(lambda: num_uploading(server), 10, "an upload is stored in part")
                num_kills += 1
                await kill_and_restart(server)
                assert not num_uploading(server)
        assert num_kills == NUM_KILLS
        assert (state.status, state.num_lines) == ("completed", NUM_LINES + 1)
        assert (state.num_completed, state.num_failed) == (NUM_LINES, 1)
        assert state.output_file_id is not None
        assert state.error_file_id is not None
        output = [json.loads(line) for line in await read(client, state.output_file_id)]
        (wrong,) = [json.loads(line) for line in await read(client, state.error_file_id)]
    assert [line["custom_id"] for line in output] == [name for name in bodies if name != "wrong"]
    assert wrong["response"]["body"]["error"]["param"] == "temperature"
    near = await check_exact(http, cluster.router.address, bodies, output)
    note(f"{NUM_LINES} lines, {NUM_KILLS} kills, {near} near ties decided otherwise")
    assert near <= MOST_NEAR


async def read(client: BatchClient, file_id: str) -> list[bytes]:
    return b"".join([piece async for piece in client.content(file_id)]).splitlines()


def num_uploading(server: Process) -> int:
    """Files of which a part is stored."""
    with closing(sqlite3.connect(server.log_path.parent / "batch.sqlite")) as database:
        found = database.execute("SELECT count(*) FROM files WHERE NOT is_whole")
        return int(found.fetchone()[0])


async def test_the_command_line_says_the_same_over_both_protocols(
    server: Process, model: str, tmp_path: Path
) -> None:
    bodies = {name: {**body, "max_tokens": 2} for name, body in list(chats(model).items())[-3:]}
    (tmp_path / "in.jsonl").write_bytes(file_of(CHAT, bodies))
    urls = (f"http://{server.http_address}", f"grpc://{server.address}")
    said = []
    for url in urls:

        async def command(*args: str, url: str = url) -> subprocess.CompletedProcess[str]:
            line = [sys.executable, "-m", "diptych.cli", "batch", *args, "--url", url]
            return await asyncio.to_thread(
                subprocess.run, line, cwd=tmp_path, capture_output=True, text=True, timeout=60
            )

        made = await command("submit", "in.jsonl", "--wait")
        batch = made.stdout.strip()
        told = [made, await command("status", batch), await command("cancel", batch)]
        assert [each.returncode for each in told] == [1, 1, 1]
        assert "2 answered, 1 failed of 3" in made.stderr
        for flags in ([], ["--errors"]):
            told.append(await command("results", batch, *flags))
            assert told[-1].returncode == 0, told[-1].stderr
        said.append([(each.stdout, each.stderr.replace(batch, "BATCH")) for each in told[1:3]])
        said[-1] += [(lines_without_ids(each.stdout), each.stderr) for each in told[3:]]
    assert said[0] == said[1]


def lines_without_ids(written: str) -> str:
    """Of results what does not differ from batch to batch."""
    lines = [json.loads(line) for line in written.splitlines()]
    return json.dumps([(each["custom_id"], choices_of(each)) for each in lines])


def choices_of(line: dict[str, Any]) -> Any:
    body = line["response"]["body"]
    return body.get("choices", body)


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


def texts_of(output: list[dict[str, Any]]) -> list[str]:
    """Of a response's items."""
    return [part["text"] for item in output for part in item["content"]]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "The quiet garden opens", "temperature": 0}),
        (
            "/v1/responses",
            {"input": "The quiet garden opens", "instructions": "Go on.", "temperature": 0},
        ),
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
    told = line["response"]["body"]
    if path == "/v1/responses":
        assert texts_of(told["output"]) == texts_of(answer["output"]) != []
        assert told["usage"]["input_tokens"] > 0
        return
    part = "data" if path == "/v1/embeddings" else "choices"
    assert told[part] == answer[part]
    assert told["usage"]["prompt_tokens"] > 0


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


async def test_a_page_reads_nothing_by_a_name_that_was_made_to_lead_here(server: Process) -> None:
    async with httpx.AsyncClient(base_url=f"http://{server.http_address}") as client:
        for host, status in (("evil.example", 421), ("localhost", 200)):
            answer = await client.get("/v1/files", headers={"host": host})
            assert answer.status_code == status


async def test_it_tells_how_it_is(server: Process) -> None:
    await until(lambda: server.metric("diptych_batches_open") == 0, 30, "batches end")
    assert server.metric("diptych_batch_lines_sent") == 0
    assert server.metric("diptych_batch_lines_limit") >= 1


async def test_answers_of_a_batch_that_left_for_others_are_exact(cluster: Cluster) -> None:
    """Others come while its sequences run, and all together need more blocks than there are."""
    left = 'diptych_sequences_yielded_total{what="blocks"}'
    (worker,) = cluster.decode
    async with cluster.client() as client:

        async def answer(number: int, length: int, num_tokens: int, level: ServiceLevel) -> Run:
            options = SamplingOptions(
                temperature=0.0 if number % 2 else 0.8,
                seed=number,
                max_tokens=num_tokens,
                ignore_eos=True,
                return_margins=True,
            )
            got, prompt = Run([], []), [5 + (number * 31 + place) % 97 for place in range(length)]
            async for chunk in client.generate(token_ids=prompt, options=options, level=level):
                got.token_ids.extend(chunk.token_ids)
                got.margins.extend(chunk.margins)
                num_told[number] = len(got.token_ids)
            return got

        num_told: dict[int, int] = {}
        of_batch = ServiceLevel(RequestClass.BATCH)
        alone = [await answer(number, 10, 230, of_batch) for number in range(4)]
        before = worker.metrics()[left]
        num_told.clear()
        async with asyncio.TaskGroup() as tasks:
            batch = [tasks.create_task(answer(each, 10, 230, of_batch)) for each in range(4)]
            while len(num_told) < len(batch) or min(num_told.values()) < 100:
                await asyncio.sleep(0)
            others = [tasks.create_task(answer(each, 120, 130, NO_LEVEL)) for each in (4, 5, 6)]
    assert worker.metrics()[left] > before
    assert [len(task.result().token_ids) for task in others] == [130] * 3
    for task, want in zip(batch, alone, strict=True):
        near_tie(task.result().token_ids, want, "left for others")

"""A batch server in pieces: a real database in a folder, and routers that are a function."""

import asyncio
import hashlib
import importlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import httpx
import pytest
from sqlalchemy import Connection

from batch_server.records import Batch, Endpoint, StoredFile
from batch_server.runner.batch_run import BatchRun, Needs
from batch_server.runner.input_file import InputBounds
from batch_server.runner.pace import Pace
from batch_server.runner.sender import AnswerBounds, LineSender
from batch_server.runner.slots import Slots
from batch_server.status import BatchStatus
from batch_server.store.batches import BatchStore
from batch_server.store.database import Database
from batch_server.store.files import FileStore
from batch_server.store.tenant_room import TenantBounds

P = ParamSpec("P")
T = TypeVar("T")

CHAT: Endpoint = "/v1/chat/completions"
NOW_S = 1_000_000.0
INPUT = "file-input"
BATCH = "batch_one"
BOUNDS = InputBounds(max_lines=1000, max_line_bytes=10_000)
ANSWERS = AnswerBounds(max_bytes=10_000, timeout_s=60.0)
ROUTERS = ("http://a:1", "http://b:2")


class KilledError(BaseException):
    """The process ends here."""


@dataclass
class Death:
    """Ends a process at its ``at``-th chance: whenever something that it waited for is done.

    It was not told yet. (Just before the next thing would be no other place: there is nothing
    between that lasts.)
    """

    at: int | None = None
    num_chances: int = 0
    is_dead: bool = False

    def check(self) -> None:
        if self.is_dead:
            raise KilledError

    def chance(self) -> None:
        if self.num_chances == self.at:
            self.is_dead = True
        self.num_chances += 1
        self.check()


class MortalDatabase(Database):
    """May die with each transaction, which is stored."""

    def __init__(self, url: str, death: Death) -> None:
        super().__init__(url)
        self._death = death

    async def call(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        self._death.check()
        made = await super().call(work, *args, **kwargs)
        self._death.chance()
        return made


Answering = Callable[[httpx.Request], httpx.Response]


def answer_of(body: dict[str, Any]) -> str:
    """What a model says: the same to the same prompt with the same seed."""
    told = json.dumps([body["messages"], body["seed"]])
    return hashlib.sha256(told.encode()).hexdigest()[:12]


def well(request: httpx.Request) -> httpx.Response:
    """As a router answers."""
    text = answer_of(json.loads(request.content))
    choice = {"index": 0, "message": {"role": "assistant", "content": text}}
    content = {"id": f"chatcmpl-{request.headers['x-request-id']}", "choices": [choice]}
    return httpx.Response(200, json=content)


@dataclass
class FakeRouters:
    """Answers by ``answering``, and keeps what it was asked."""

    answering: Answering = well
    death: Death = field(default_factory=Death)
    asked: list[httpx.Request] = field(default_factory=list)

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.death.check()
        self.asked.append(request)
        response = self.answering(request)
        self.death.chance()
        return response

    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(request.content) for request in self.asked]


def a_batch(
    batch_id: str = BATCH,
    *,
    tenant: str = "",
    expires_s: float = NOW_S + 14 * 86_400,
    metadata: Mapping[str, str] | None = None,
) -> Batch:
    """One that is new."""
    return Batch(
        batch_id=batch_id,
        tenant=tenant,
        endpoint=CHAT,
        input_file_id=INPUT,
        completion_window="1m",
        status=BatchStatus.VALIDATING,
        created_s=1,
        expires_s=int(expires_s),
        metadata=metadata,
    )


@dataclass
class Rig:
    """One process's life."""

    files: FileStore
    batches: BatchStore
    needs: Needs
    one: BatchRun
    slots: Slots
    pauses: list[float]
    clock_s: float = NOW_S

    async def add_input(self, data: bytes, *, tenant: str = "", chunk_bytes: int = 64) -> None:
        """An uploaded file, in small chunks."""
        file = StoredFile(
            file_id=INPUT,
            tenant=tenant,
            purpose="batch",
            filename="in.jsonl",
            created_s=1,
            num_bytes=len(data),
        )
        assert await self.files.begin(file, 10**9)
        for number, start in enumerate(range(0, len(data), chunk_bytes)):
            await self.files.add_chunk(INPUT, number, data[start : start + chunk_bytes])
        await self.files.finish(INPUT)

    async def add_batch(self, batch_id: str = BATCH, **fields: Any) -> None:
        assert await self.batches.add(a_batch(batch_id, **fields), TenantBounds(10, 10**9)) is None

    async def run(self) -> Batch:
        """The batch until it has ended."""
        await self.one.run()
        return await self.get()

    async def get(self) -> Batch:
        batch = await self.batches.get(BATCH)
        assert batch is not None
        return batch

    async def content(self, file_id: str | None, tenant: str = "") -> list[dict[str, Any]]:
        """The lines of a file of results."""
        assert file_id is not None
        file = await self.files.find(tenant, file_id)
        assert file is not None
        lines: list[bytes] = []
        number = 0
        while found := await self.files.results_after(file, number):
            number = found[-1][0]
            lines += [line for _, line in found]
        assert sum(map(len, lines)) == file.num_bytes
        assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in lines)
        return [json.loads(line) for line in lines]


@asynccontextmanager
async def opened(
    folder: Path,
    routers: FakeRouters | None = None,
    *,
    death: Death | None = None,
    max_concurrent: int = 2,
    max_attempts: int = 3,
    bounds: InputBounds = BOUNDS,
    answers: AnswerBounds = ANSWERS,
    url: str = "",
) -> AsyncIterator[Rig]:
    """A process that uses the database in ``folder``, or at ``url``. Nobody sleeps."""
    routers = routers or FakeRouters()
    pauses: list[float] = []
    url = url or f"sqlite:///{folder / 'batch.sqlite'}"

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        rig.clock_s += pause_s
        await asyncio.sleep(0)

    client = httpx.AsyncClient(transport=httpx.MockTransport(routers))
    async with MortalDatabase(url, death or Death()) as database, client:
        files, batches = FileStore(database), BatchStore(database)
        slots = Slots(Pace(max_concurrent), lambda: rig.clock_s, sleep)
        sender = LineSender(
            client, ROUTERS, slots, max_attempts, answers, sleep=sleep, clock=lambda: rig.clock_s
        )
        needs = Needs(
            batches, files, sender, bounds, max_concurrent, lambda: rig.clock_s, sleep=sleep
        )
        rig = Rig(files, batches, needs, BatchRun(BATCH, needs), slots, pauses)
        yield rig


@contextmanager
def held_up(
    monkeypatch: pytest.MonkeyPatch, name: str, begun: asyncio.Event
) -> Iterator[Callable[[], None]]:
    """The database is amid the work of that name until what this gives is called."""
    module, _, function = name.rpartition(".")
    work = getattr(importlib.import_module(module), function)
    loop, go_on = asyncio.get_running_loop(), threading.Event()

    def waiting(connection: Connection, *args: Any) -> Any:
        made = work(connection, *args)
        loop.call_soon_threadsafe(begun.set)
        assert go_on.wait(60)
        return made

    monkeypatch.setattr(name, waiting)
    try:
        yield go_on.set
    finally:
        go_on.set()


def line(custom_id: str, content: str, **more: Any) -> bytes:
    body = {"messages": [{"role": "user", "content": content}], **more}
    told = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}
    return json.dumps(told).encode() + b"\n"


def texts(lines: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Of each line of an output file what was said."""
    return {
        each["custom_id"]: each["response"]["body"]["choices"][0]["message"]["content"]
        for each in lines
    }

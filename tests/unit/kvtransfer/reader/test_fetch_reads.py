"""The reads of one fetch, over stand-ins for its stream, the source's memory and the thread."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from diptych.timers import Timers
from diptych.v1 import decode_pb2, kv_source_pb2
from diptych.v1.kv_source_pb2 import FetchCommand, FetchEvent
from kvtransfer.digest import coverages
from kvtransfer.errors import TransportError
from kvtransfer.memory import HostMemory
from kvtransfer.reader.fetch_driver import FetchDriver, FetchPlan
from kvtransfer.reader.proven_link import Link
from kvtransfer.reader.pull_machine import PullError
from kvtransfer.reader.quarantine import Quarantine
from kvtransfer.transports.ways import Way

BLOCK_SIZE, BLOCK_BYTES, NUM_BLOCKS = 4, 16, 5
SOURCE_BLOCKS, LOCAL_BLOCKS = (7, 2, 9, 4, 1), (3, 8, 5, 0, 6)
END_TOKEN = NUM_BLOCKS * BLOCK_SIZE
SLOTS = (5, 3, 8, 0, 6)  # of the source's staging blocks
PROMPT = b"p" * 16


class Thread:
    """Does what is posted at once."""

    def post(self, job: Callable[[], None]) -> None:
        job()


class Copy:
    wakes = False

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def post(self) -> bool:
        self._run()
        return True

    def poll(self) -> bool:
        raise AssertionError("it was over when it was posted")


class Source:
    """Its memory, as a peer that is read; of one that stages, by its staging blocks."""

    def __init__(self, *, is_staged: bool = False) -> None:
        self.memory = HostMemory(bytearray(range(160)), BLOCK_BYTES)
        self.local = HostMemory(bytearray(160), BLOCK_BYTES)
        self.is_staged = is_staged
        self.error: TransportError | None = None
        """That the second read ends with."""
        self.reads: list[tuple[int, ...]] = []
        self.taken: list[tuple[int, ...]] = []
        self._where = dict(zip(SLOTS, SOURCE_BLOCKS, strict=True)) if is_staged else {}

    def read(self, source: tuple[int, ...], local: tuple[int, ...], num_bytes: int) -> Copy:
        self.reads.append(source)
        error = self.error if len(self.reads) == 2 else None

        def run() -> None:
            if error is not None:
                raise error
            for theirs, ours in zip(source, local, strict=True):
                block = self.memory.block(self._where.get(theirs, theirs))
                self.local.block(ours)[:num_bytes] = block[:num_bytes]

        return Copy(run)


class Call:
    """A Fetch of such a source: all is announced at once."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._events: asyncio.Queue[FetchEvent | None] = asyncio.Queue()
        self._num_events = 0

    def add_done_callback(self, callback: object) -> None: ...

    def cancel(self) -> None: ...

    async def done_writing(self) -> None:
        self._events.put_nowait(None)

    async def read(self) -> FetchEvent | None:
        return await self._events.get()

    async def write(self, command: FetchCommand) -> None:
        match command.WhichOneof("command"):
            case "open":
                opened = kv_source_pb2.FetchOpened(end_token=END_TOKEN, prompt_digest=PROMPT)
                self._say(FetchEvent(opened=opened))
                self._say(FetchEvent(range=self._range()))
                if self._source.is_staged:
                    self._say(FetchEvent(staged=kv_source_pb2.Staged(slots=SLOTS)))
            case "taken":
                self._source.taken.append(tuple(command.taken.slots))
            case "confirm":
                self._say(FetchEvent(confirmed=kv_source_pb2.Confirmed()))

    def _say(self, event: FetchEvent) -> None:
        self._num_events += 1
        event.number = self._num_events
        self._events.put_nowait(event)

    def _range(self) -> kv_source_pb2.Range:
        whole = coverages([BLOCK_BYTES] * NUM_BLOCKS)
        return kv_source_pb2.Range(
            num_tokens=END_TOKEN,
            block_ids=SOURCE_BLOCKS,
            generations=[1] * NUM_BLOCKS,
            digests=self._source.memory.digests(SOURCE_BLOCKS, whole),
            last=True,
        )


async def pull(source: Source, max_read_bytes: int) -> None:
    """All of it; a guard ends one that hangs."""
    plan = FetchPlan(
        open=kv_source_pb2.FetchOpen(),
        end_token=END_TOKEN,
        prompt_digest=PROMPT,
        local_block_ids=LOCAL_BLOCKS,
    )
    stub = SimpleNamespace(Fetch=lambda _: Call(source))
    way = Way("", staged_at_source=source.is_staged)
    link = Link(cast(Any, stub), "nixl", cast(Any, source), lambda: None, way)
    endpoint = SimpleNamespace(
        thread=Thread(),
        memory=source.local,
        layout=SimpleNamespace(block_size=BLOCK_SIZE, digest_level="full"),
        needs=SimpleNamespace(num_bytes_of=lambda index, num_tokens: BLOCK_BYTES),
        config=SimpleNamespace(max_read_bytes=max_read_bytes),
    )
    quarantine = Quarantine(lambda _: None, lambda _: None)
    async with asyncio.timeout(5):
        await FetchDriver(plan, link, cast(Any, endpoint), quarantine, Timers()).run()


@pytest.mark.parametrize("is_staged", [False, True], ids=["direct", "staged"])
@pytest.mark.parametrize(
    ("max_read_bytes", "at_once"), [(1, 1), (BLOCK_BYTES, 1), (3 * BLOCK_BYTES - 1, 2), (999, 5)]
)
async def test_a_range_is_read_in_pieces_of_so_many_bytes_or_a_block(
    max_read_bytes: int, at_once: int, *, is_staged: bool
) -> None:
    """Each block lands in its place, and each staging block is given back with its piece."""
    source = Source(is_staged=is_staged)
    await pull(source, max_read_bytes)
    asked = SLOTS if is_staged else SOURCE_BLOCKS
    pieces = [asked[begin : begin + at_once] for begin in range(0, NUM_BLOCKS, at_once)]
    assert source.reads == pieces
    assert source.taken == (pieces if is_staged else [])
    for theirs, ours in zip(SOURCE_BLOCKS, LOCAL_BLOCKS, strict=True):
        assert source.local.block(ours) == source.memory.block(theirs)


async def test_a_read_that_fails_ends_its_pull_at_once() -> None:
    """Not only when nothing has moved for long: another try may come through."""
    source = Source()
    source.error = TransportError("the other end is gone")
    with pytest.raises(PullError, match="the other end is gone") as caught:
        await pull(source, BLOCK_BYTES)
    assert caught.value.failure == decode_pb2.PULL_FAILURE_TRANSPORT

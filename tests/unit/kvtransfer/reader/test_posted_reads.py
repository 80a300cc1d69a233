"""Reads of one pull, from when they are handed to the transfer thread."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

from kvtransfer.errors import TransportError
from kvtransfer.reader.posted_reads import Landed, ReadGroup
from kvtransfer.reader.quarantine import Quarantine


class Thread:
    """Runs what was posted when the test says so."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], None]] = []

    def post(self, job: Callable[[], None]) -> None:
        self.jobs.append(job)

    def run(self) -> None:
        while self.jobs:
            self.jobs.pop(0)()


class Copy:
    """Ends as it is posted."""

    wakes = False
    is_posted = False

    def post(self) -> bool:
        self.is_posted = True
        return True

    def poll(self) -> bool:
        raise AssertionError("it has ended")


class Reads:
    """One read, of local block 5."""

    def __init__(self) -> None:
        self.thread, self.copy = Thread(), Copy()
        self.quarantine = Quarantine(lambda _: None, lambda _: None)
        self.outcomes: list[Landed | TransportError] = []
        memory: Any = None  # no digests are taken
        thread = cast(Any, self.thread)
        self.group = ReadGroup(thread, memory, self.quarantine, "nixl", self.outcomes.append)
        self.group.start(self.copy, (5,), first_block=0, num_completed=1, to_digest=())


async def test_what_is_abandoned_before_it_was_posted_never_is() -> None:
    """Its blocks are quarantined until the transfer thread has come by it, and written by none."""
    reads = Reads()
    assert reads.group.abandon() == {5}
    assert set(reads.quarantine.block_ids) == {5}
    reads.thread.run()
    await asyncio.sleep(0)
    assert not reads.copy.is_posted
    assert not reads.quarantine.block_ids
    assert not reads.outcomes, "nobody waits for it"

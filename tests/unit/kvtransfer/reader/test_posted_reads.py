"""Reads of one pull, from when they are handed to the transfer thread."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

from kvtransfer.errors import TransportError
from kvtransfer.reader.posted_reads import MAX_POSTED, Landed, ReadGroup
from kvtransfer.reader.quarantine import Quarantine


class Thread:
    """Runs what was posted when the test says so."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], None]] = []
        self.pollers: list[Callable[[], bool]] = []

    def post(self, job: Callable[[], None]) -> None:
        self.jobs.append(job)

    def poll(self, poller: Callable[[], bool], *, wakes: bool = False) -> None:
        self.pollers.append(poller)

    def run(self) -> None:
        while self.jobs:
            self.jobs.pop(0)()
        polled, self.pollers = self.pollers, []
        self.pollers += [poller for poller in polled if not poller()]


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


class Agent:
    """Is given copies, and ends them in the order in which it was."""

    def __init__(self) -> None:
        self.copies: list[LongCopy] = []

    def end_oldest(self) -> None:
        self.copies.pop(0).has_ended = True


class LongCopy:
    wakes = True

    def __init__(self, agent: Agent, pull: str) -> None:
        self.agent, self.pull = agent, pull
        self.has_ended = False

    def post(self) -> bool:
        self.agent.copies.append(self)
        return False

    def poll(self) -> bool:
        return self.has_ended


class LongPull:
    """Many reads at once, of a block each."""

    def __init__(self, name: str, agent: Agent, thread: Thread, block_ids: range) -> None:
        self.quarantine = Quarantine(lambda _: None, lambda _: None)
        self.landed: list[int] = []
        memory: Any = cast(Any, self)
        self.group = ReadGroup(cast(Any, thread), memory, self.quarantine, "nixl", self._ended)
        for place, block_id in enumerate(block_ids):
            self.group.start(
                LongCopy(agent, name), (block_id,), first_block=place, num_completed=1, to_digest=()
            )

    def digests(self, block_ids: object, coverages: object) -> tuple[bytes, ...]:
        return ()

    def _ended(self, outcome: Landed | TransportError) -> None:
        assert isinstance(outcome, Landed)
        self.landed.append(outcome.first_block)


async def test_a_long_pull_leaves_others_their_turn_and_comes_to_its_end() -> None:
    agent, thread = Agent(), Thread()
    long = LongPull("long", agent, thread, range(20))
    short = LongPull("short", agent, thread, range(20, 21))
    thread.run()
    pulls = [copy.pull for copy in agent.copies]
    assert pulls == ["long"] * MAX_POSTED + ["short"], "not behind all of the long one"
    while agent.copies:
        assert len(agent.copies) <= MAX_POSTED + 1
        agent.end_oldest()
        thread.run()
        await asyncio.sleep(0)
    assert (long.landed, short.landed) == (list(range(20)), [0])


async def test_of_a_long_pull_that_is_given_up_few_blocks_wait_for_a_read() -> None:
    """Others' reads are not behind all of it, nor has its agent to end for it to be over."""
    agent, thread = Agent(), Thread()
    pull = LongPull("long", agent, thread, range(20))
    thread.run()
    assert pull.group.abandon() == frozenset(range(20))
    thread.run()
    await asyncio.sleep(0)
    assert set(pull.quarantine.block_ids) == set(range(MAX_POSTED))
    while agent.copies:
        agent.end_oldest()
        thread.run()
    await asyncio.sleep(0)
    assert not pull.quarantine.block_ids
    assert not pull.landed


class PartedLongCopy(LongCopy):
    """Is at its next part, until it is told to begin none."""

    def stop(self) -> None:
        self.has_ended = True


async def test_a_read_in_parts_is_told_that_its_pull_is_over() -> None:
    agent, thread, quarantine = Agent(), Thread(), Quarantine(lambda _: None, lambda _: None)
    memory: Any = None
    group = ReadGroup(cast(Any, thread), memory, quarantine, "staged", lambda _: None)
    copy = PartedLongCopy(agent, "pull")
    group.start(copy, (5,), first_block=0, num_completed=1, to_digest=())
    thread.run()
    thread.run()
    assert not copy.has_ended
    assert group.abandon() == {5}
    thread.run()
    await asyncio.sleep(0)
    assert not quarantine.block_ids

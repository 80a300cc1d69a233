"""Places among tenants and their batches."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_server.records import Batch, LineOwner
from batch_server.runner.batch_run import BatchRun
from batch_server.runner.pace import Pace
from batch_server.runner.slots import Slots
from tests.unit.batch_server.rig import line, opened
from tests.waiting import until

NUM_TASKS = 16  # of each batch
MANY = [LineOwner("a", f"batch_{index}") for index in range(8)]
ONE = LineOwner("b", "batch_b")


class FakeSender:
    """Routers that answer a line some turns of the event loop after it came."""

    def __init__(self, num_places: int) -> None:
        self.slots = Slots(Pace(num_places), lambda: 0.0)
        self.sent: list[LineOwner] = []
        self.most_taken = 0

    async def answer(self, owner: LineOwner) -> None:
        async with self.slots.place(owner):
            self.sent.append(owner)
            self.most_taken = max(self.most_taken, self.slots.num_taken)
            for _ in range(5):
                await asyncio.sleep(0)


async def sent_of(sender: FakeSender, owners: Sequence[LineOwner], num_lines: int) -> None:
    """All lines of batches that begin one after the other, each batch with tasks of its own."""

    async def some(owner: LineOwner, left: Iterator[int]) -> None:
        for _ in left:
            await sender.answer(owner)

    async with asyncio.TaskGroup() as tasks:
        for owner in owners:
            left = iter(range(num_lines))
            for _ in range(NUM_TASKS):
                tasks.create_task(some(owner, left), name=owner.batch_id)
    assert sender.slots.num_taken == 0


@pytest.mark.parametrize("num_places", [1, 3, 4])
async def test_a_tenant_with_one_batch_gets_as_much_as_one_with_many(num_places: int) -> None:
    sender = FakeSender(num_places)
    await sent_of(sender, [*MANY, ONE], 40)
    assert sender.most_taken == num_places
    assert 18 <= sender.sent[:40].count(ONE) <= 22
    of_many = [owner for owner in sender.sent[:80] if owner != ONE]
    others = Counter(of_many[num_places:])  # the first came when nobody else was there
    assert set(others) == set(MANY)
    assert max(others.values()) - min(others.values()) <= 1, "its batches take turns"


async def test_lines_of_batches_wait_for_places_as_their_tenants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners = [LineOwner("a", "batch_1"), LineOwner("a", "batch_2"), LineOwner("b", "batch_3")]
    asked = Counter[LineOwner]()
    place = Slots.place

    def counted(self: Slots, owner: LineOwner) -> AbstractAsyncContextManager[None]:
        asked[owner] += 1
        return place(self, owner)

    monkeypatch.setattr(Slots, "place", counted)
    async with opened(tmp_path) as rig:
        await rig.add_input(line("a", "one") + line("b", "two"))
        for owner in owners:
            await rig.add_batch(owner.batch_id, tenant=owner.tenant)
            await BatchRun(owner.batch_id, rig.needs).run()
    assert asked == dict.fromkeys(owners, 2)


async def test_one_tenant_alone_gets_all_places() -> None:
    sender = FakeSender(4)
    await sent_of(sender, MANY[:1], 40)
    assert (sender.most_taken, len(sender.sent)) == (4, 40)


async def test_tenants_that_hold_as_many_come_in_turn() -> None:
    sender = FakeSender(1)
    await sent_of(sender, [*MANY[:4], ONE, LineOwner("c", "batch_c")], 10)
    tenants = [owner.tenant for owner in sender.sent]
    in_turn = itertools.islice(itertools.cycle(["a", "b", "c"]), 30)
    assert tenants[:31] == ["a", *in_turn], "the first came when nobody else was there"


class Lines:
    """Tasks that wait for places, and have them until they are told to leave."""

    def __init__(self, slots: Slots, tasks: asyncio.TaskGroup) -> None:
        self._slots = slots
        self._tasks = tasks
        self.alive: dict[asyncio.Task[None], asyncio.Event] = {}
        self.holding: set[asyncio.Task[None]] = set()

    def come(self, owner: LineOwner) -> asyncio.Task[None]:
        done = asyncio.Event()

        async def hold() -> None:
            async with self._slots.place(owner):
                self.holding.add(task)
                await done.wait()

        task = self._tasks.create_task(hold(), name="line")
        self.alive[task] = done
        return task

    def leave(self, task: asyncio.Task[None]) -> None:
        self.alive.pop(task).set()

    def cancel(self, task: asyncio.Task[None]) -> None:
        del self.alive[task]
        task.cancel()

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)
        self.holding &= set(self.alive)


async def test_a_line_that_is_cancelled_just_as_it_gets_a_place_hands_it_on() -> None:
    slots = Slots(Pace(1), lambda: 0.0)
    async with asyncio.TaskGroup() as tasks:
        lines = Lines(slots, tasks)
        first, second, third = (lines.come(owner) for owner in (ONE, MANY[0], ONE))
        await lines.settle()
        assert lines.holding == {first}
        lines.leave(first)
        with suppress(asyncio.CancelledError):
            await first
        lines.cancel(second)  # it was given the place, and has not run since
        await lines.settle()
        assert lines.holding == {third}
        lines.leave(third)
    assert slots.num_taken == 0


@pytest.mark.parametrize("owner", [ONE, LineOwner("b", "another"), MANY[0]])
async def test_a_line_that_is_cancelled_while_it_waits_takes_nobodys_place(
    owner: LineOwner,
) -> None:
    """The last of its batch, of its tenant, or neither."""
    slots = Slots(Pace(1), lambda: 0.0)
    async with asyncio.TaskGroup() as tasks:
        lines = Lines(slots, tasks)
        first, second, third = (lines.come(each) for each in (ONE, owner, ONE))
        await lines.settle()
        lines.cancel(second)
        await lines.settle()
        lines.leave(first)
        await lines.settle()
        assert lines.holding == {third}
        lines.leave(third)
    assert slots.num_taken == 0


async def test_a_pause_that_grows_while_it_is_waited_out_is_waited_out_whole() -> None:
    now_s = 0.0

    async def pause(pause_s: float) -> None:
        nonlocal now_s
        now_s += pause_s
        if now_s < 4.0:  # another line was refused meanwhile
            slots.pace.refused(now_s, 3.0)

    slots = Slots(Pace(2), lambda: now_s, pause)
    slots.pace.refused(now_s, 2.0)
    async with slots.place(ONE):
        assert now_s == 5.0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["come", "come", "leave", "cancel", "settle"]), st.integers(0, 7)
        ),
        max_size=60,
    )
)
def test_no_place_is_lost_however_lines_end(steps: list[tuple[str, int]]) -> None:
    async def run() -> None:
        slots = Slots(Pace(3), lambda: 0.0)
        async with asyncio.TaskGroup() as tasks:
            lines = Lines(slots, tasks)
            for step, number in steps:
                alive, holding = list(lines.alive), [t for t in lines.alive if t in lines.holding]
                if step == "come":
                    lines.come(LineOwner(str(number % 3), str(number)))
                elif step == "leave" and holding:
                    lines.leave(holding[number % len(holding)])
                elif step == "cancel" and alive:
                    lines.cancel(alive[number % len(alive)])
                elif step == "settle":
                    await lines.settle()
                    assert slots.num_taken == len(lines.holding) == min(3, len(lines.alive))
            for task in list(lines.alive):
                lines.cancel(task)
        assert (slots.num_taken, bool(slots._turns)) == (0, False)

    asyncio.run(run())


async def test_tenants_take_turns_to_have_their_files_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived, read = set[int](), list[str]()
    may_end = asyncio.Event()
    check_in_turn, check = BatchRun._check_in_turn, BatchRun._check

    async def arrive(self: BatchRun, batch: Batch) -> None:
        arrived.add(int(batch.batch_id))
        await check_in_turn(self, batch)

    async def held_up(self: BatchRun, batch: Batch) -> None:
        read.append(batch.tenant)
        await may_end.wait()
        await check(self, batch)

    monkeypatch.setattr(BatchRun, "_check_in_turn", arrive)
    monkeypatch.setattr(BatchRun, "_check", held_up)
    async with opened(tmp_path) as rig, asyncio.TaskGroup() as tasks:
        await rig.add_input(line("a", "x"), tenant="a")
        for number, tenant in enumerate("aaaaaab", 1):
            await rig.add_batch(str(number), tenant=tenant)
            tasks.create_task(BatchRun(str(number), rig.needs).run(), name=tenant)
            await until(partial(arrived.__contains__, number))
        may_end.set()
    assert read == ["a", "a", "a", "b", "a", "a", "a"]

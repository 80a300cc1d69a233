"""Answers to several prompts, told one by one: each hears that its event was written."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from diptych.errors import NoWorkerError
from router.frontend.http.merged_events import MergedEvents
from router.generation.answer import Delta, GenerationEvent


class Answers:
    """So many of them, with three events each; one may fail behind its first."""

    def __init__(self, count: int, failing: int | None = None) -> None:
        self.written: list[list[int]] = [[] for _ in range(count)]
        self.num_begun = 0
        self.closed: list[int] = []
        self._failing = failing

    async def events(self, prompt: int) -> AsyncGenerator[GenerationEvent, None]:
        self.num_begun += 1
        try:
            for position in range(3):
                if prompt == self._failing and position:
                    raise NoWorkerError("none")
                yield Delta("a", [1], position, [])
                self.written[prompt].append(position)
        finally:
            self.closed.append(prompt)


async def test_events_come_in_order_and_few_answers_at_a_time() -> None:
    answers, merged = Answers(5), MergedEvents(5)
    taken: list[list[int]] = [[] for _ in range(5)]
    async with asyncio.TaskGroup() as tasks:
        shared = ((prompt, answers.events(prompt)) for prompt in range(5))
        for _ in range(2):
            tasks.create_task(merged.follow(shared))
        async for prompt, event in merged.events():
            assert isinstance(event, Delta)
            await asyncio.sleep(0)  # it is being written
            assert answers.written[prompt] == taken[prompt], "this one is not written yet"
            taken[prompt].append(event.position)
            assert answers.num_begun <= 2 + len(answers.closed)
    assert taken == answers.written == [[0, 1, 2]] * 5


async def test_one_that_fails_is_told_and_all_are_closed() -> None:
    answers, merged = Answers(3, failing=1), MergedEvents(3)
    async with asyncio.TaskGroup() as tasks:
        shared = ((prompt, answers.events(prompt)) for prompt in range(3))
        following = [tasks.create_task(merged.follow(shared)) for _ in range(3)]
        with pytest.raises(NoWorkerError):
            async for _ in merged.events():
                pass
        for each in following:
            each.cancel()
    assert sorted(answers.closed) == [0, 1, 2]


async def test_who_gives_up_amid_a_write_hears_what_the_others_end_with() -> None:
    answers, merged = Answers(2, failing=1), MergedEvents(2)
    async with asyncio.TaskGroup() as tasks:
        shared = ((prompt, answers.events(prompt)) for prompt in (1, 0))
        following = [tasks.create_task(merged.follow(shared)) for _ in range(2)]
        events = merged.events()
        assert (await anext(events)).prompt == 1
        with pytest.raises(NoWorkerError):
            async with asyncio.timeout(60):
                await merged.give_up()
        for each in following:
            each.cancel()
    await events.aclose()
    assert sorted(answers.closed) == [0, 1]

"""The events of several answers as they come, told one by one. Event loop only."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import NamedTuple

from diptych.errors import DiptychError
from router.generation.answer import GenerationEvent


class OfPrompt(NamedTuple):
    """An event of the answer to one of several prompts."""

    prompt: int
    event: GenerationEvent


class MergedEvents:
    """Owns what was told and not taken yet: one event of each answer at most.

    An answer hears that its event was written when its reader asks for the next one, as it
    would if it were alone.
    """

    def __init__(self, num_answers: int) -> None:
        self._num_open = num_answers
        self._told: asyncio.Queue[OfPrompt | DiptychError | None] = asyncio.Queue()
        self._written: dict[int, asyncio.Event] = {}

    async def follow(
        self, answers: Iterator[tuple[int, AsyncGenerator[GenerationEvent, None]]]
    ) -> None:
        """Tell all events of answer after answer; its own task.

        ``answers`` are those that nobody follows yet, with their prompts: as many are under way
        as there are such tasks.
        """
        for prompt, events in answers:
            async with aclosing(events):
                try:
                    async for event in events:
                        written = self._written[prompt] = asyncio.Event()
                        self._told.put_nowait(OfPrompt(prompt, event))
                        await written.wait()
                except DiptychError as error:
                    self._told.put_nowait(error)
                    return
            self._told.put_nowait(None)

    async def events(self) -> AsyncGenerator[OfPrompt, None]:
        """Until all have ended. Raises DiptychError: one of them failed."""
        while self._num_open:
            told = await self._told.get()
            if isinstance(told, DiptychError):
                raise told
            if told is None:
                self._num_open -= 1
                continue
            yield told
            self._written[told.prompt].set()

    async def give_up(self) -> None:
        """Write nothing more, and take what is still told. Raises DiptychError: why."""
        for written in self._written.values():
            written.set()
        async for _ in self.events():
            pass

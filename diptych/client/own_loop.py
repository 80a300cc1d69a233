"""An event loop of its own for a client, in code that has none."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar


class Closable(Protocol):
    """A client that is used from one event loop."""

    async def close(self) -> None:
        """Close its connections."""
        ...


C = TypeVar("C", bound=Closable)
T = TypeVar("T")


class OwnLoop(Generic[C]):
    """A context manager around one client. Used from one thread, which runs no event loop.

    Whatever the client does it does while it is asked: between two questions nothing happens.
    """

    def __init__(self, make: Callable[[], C]) -> None:
        """``make`` is called with the block; what it raises ends that."""
        self._make = make
        self._runner: asyncio.Runner | None = None  # in the block
        self._made: C | None = None

    def __enter__(self) -> Self:
        runner = asyncio.Runner()
        try:
            self._made = runner.run(self._open())
        except BaseException:
            runner.close()
            raise
        self._runner = runner
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        runner, client = self._runner, self._client
        assert runner is not None, "use it as a context manager"
        self._runner = self._made = None
        try:
            runner.run(client.close())
        finally:
            runner.close()

    @property
    def _client(self) -> C:
        assert self._made is not None, "use it as a context manager"
        return self._made

    def _ask(self, question: Coroutine[Any, Any, T]) -> T:
        """The answer, however long it takes."""
        if self._runner is None:
            question.close()
            raise RuntimeError("its block has ended")
        return self._runner.run(question)

    def _each(self, answers: AsyncGenerator[T, None]) -> Iterator[T]:
        """One by one; whoever leaves early cancels the rest."""

        async def take() -> tuple[T, ...]:
            async for answer in answers:
                return (answer,)
            return ()

        try:
            while taken := self._ask(take()):
                yield taken[0]
        finally:
            if self._runner is not None:  # else what it would free is gone
                self._runner.run(_close(answers))

    async def _open(self) -> C:
        return self._make()


async def _close(answers: AsyncGenerator[T, None]) -> None:
    await answers.aclose()

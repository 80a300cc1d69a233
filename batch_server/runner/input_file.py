"""The file of a batch, read twice: whether all of it is right, then what is sent for each line."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

from batch_server.records import Endpoint, Line, LineError
from batch_server.runner.line_check import (
    CheckedLine,
    LineCheck,
    LineMaker,
    WrongLineError,
)
from batch_server.runner.line_splitter import LineSplitter, LineTooLongError, RawLine
from batch_server.runner.sending_order import SendingKey, ranks

_MAX_ERRORS: Final = 100  # that a client is told


class Chunks(Protocol):
    """The stored file."""

    async def chunk(self, file_id: str, number: int) -> bytes | None:
        """One piece of it; None: it has no more, or is gone."""
        ...


class InputBounds(NamedTuple):
    """Of one file."""

    max_lines: int
    max_line_bytes: int


class _GoneError(Exception):
    """The file was deleted while it was read: its last line may be cut."""


class Found(NamedTuple):
    """What the first reading told: of each line its rank by its number, or what is wrong."""

    ranks: dict[int, int]
    errors: Sequence[LineError]


class InputFile:
    """A file of requests for one endpoint. What takes time happens off the event loop."""

    def __init__(
        self, chunks: Chunks, file_id: str, endpoint: Endpoint, bounds: InputBounds
    ) -> None:
        self._chunks = chunks
        self._file_id = file_id
        self._endpoint = endpoint
        self._bounds = bounds

    async def check(self) -> Found:
        """Read all of it, or up to the hundredth wrong line."""
        survey = _Survey(self._endpoint, self._bounds)
        try:
            async for piece in self._pieces():
                await asyncio.to_thread(survey.feed, piece)
                if survey.is_over:
                    break
            else:
                await asyncio.to_thread(survey.end)
        except _GoneError:
            return Found({}, [LineError("not_found", "the file was deleted", "input_file_id")])
        return await asyncio.to_thread(survey.found)

    async def lines(self, ranks: dict[int, int], maker: LineMaker) -> AsyncIterator[list[Line]]:
        """The lines of a right file, a piece at a time; fewer where it is deleted meanwhile."""
        check = LineCheck(self._endpoint)
        splitter = LineSplitter(self._bounds.max_line_bytes)

        def made(split: Callable[[], Iterator[RawLine]]) -> list[Line]:
            return [maker.make(check.read(raw), ranks[raw.number]) for raw in split()]

        try:
            async for piece in self._pieces():
                yield await asyncio.to_thread(made, lambda piece=piece: splitter.feed(piece))  # type: ignore[misc]
        except _GoneError:
            return
        yield await asyncio.to_thread(made, splitter.end)

    async def _pieces(self) -> AsyncIterator[bytes]:
        """All of it. Raises _GoneError."""
        number = 0
        while (piece := await self._chunks.chunk(self._file_id, number)) is not None:
            yield piece
            number += 1
        if number and await self._chunks.chunk(self._file_id, 0) is None:
            raise _GoneError


class _Survey:
    """The first reading. It is over early where there is too much that is wrong."""

    def __init__(self, endpoint: Endpoint, bounds: InputBounds) -> None:
        self._max_lines = bounds.max_lines
        self._splitter = LineSplitter(bounds.max_line_bytes)
        self._max_line_bytes = bounds.max_line_bytes
        self._check = LineCheck(endpoint)
        self._keys: list[SendingKey] = []
        self._errors: list[LineError] = []
        self.is_over = False

    def feed(self, piece: bytes) -> None:
        self._take(self._splitter.feed(piece))

    def end(self) -> None:
        self._take(self._splitter.end())
        if not self._keys and not self._errors:
            self._errors.append(LineError("empty_file", "the file has no lines", "input_file_id"))

    def found(self) -> Found:
        return Found(ranks(self._keys), self._errors)

    def _take(self, lines: Iterator[RawLine]) -> None:
        try:
            for raw in lines:
                self._take_one(raw)
                if self.is_over:
                    return
        except LineTooLongError as error:
            message = f"line {error.number}: has more than {self._max_line_bytes} bytes"
            self._stop(LineError("line_too_long", message, None, error.number))

    def _take_one(self, raw: RawLine) -> None:
        try:
            checked: CheckedLine = self._check.read(raw)
        except WrongLineError as wrong:
            self._errors.append(wrong.error)
            self.is_over = len(self._errors) >= _MAX_ERRORS
            return
        self._keys.append(checked.key)
        if len(self._keys) > self._max_lines:
            message = f"the file has more than {self._max_lines} lines"
            self._stop(LineError("too_many_lines", message, "input_file_id"))

    def _stop(self, error: LineError) -> None:
        self._errors.append(error)
        self.is_over = True

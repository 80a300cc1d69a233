"""A file that comes in pieces, as lines. Pure."""

import codecs
from collections.abc import Iterator
from typing import NamedTuple


class RawLine(NamedTuple):
    """One line without its end; ``number`` counts from 1."""

    number: int
    data: bytes


class LineTooLongError(Exception):
    """The file is not read any further."""

    def __init__(self, number: int) -> None:
        super().__init__(f"line {number}")
        self.number = number


class LineSplitter:
    """Invariant: it keeps no more than the longest line that may be, and one piece.

    A mark that the file is UTF-8, with which some editors begin one, is no part of its first line.
    """

    def __init__(self, max_line_bytes: int) -> None:
        self._max_line_bytes = max_line_bytes
        self._rest = b""
        self._num_lines = 0

    def feed(self, piece: bytes) -> Iterator[RawLine]:
        """The lines that end in ``piece``; blank ones are counted and left out.

        Raises LineTooLongError.
        """
        *whole, rest = piece.split(b"\n")
        if whole:
            whole[0] = self._rest + whole[0]
            self._rest = b""
        for data in whole:
            yield from self._line(data)
        self._rest += rest
        if len(self._rest) > self._max_line_bytes:
            raise LineTooLongError(self._num_lines + 1)

    def end(self) -> Iterator[RawLine]:
        """The last line, if nothing ends it. Raises LineTooLongError."""
        rest, self._rest = self._rest, b""
        yield from self._line(rest)

    def _line(self, data: bytes) -> Iterator[RawLine]:
        self._num_lines += 1
        if len(data) > self._max_line_bytes:
            raise LineTooLongError(self._num_lines)
        if self._num_lines == 1:
            data = data.removeprefix(codecs.BOM_UTF8)
        if data.strip():
            yield RawLine(self._num_lines, data)

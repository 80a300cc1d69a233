"""A file of requests that came, read in whichever public form it has. Pure but for reading it."""

import csv
import gzip
import itertools
import json
import math
import reprlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from diptych.errors import ConfigurationError
from diptych.simulation.workload import MOST_TOKENS, Shape

_MOONCAKE_TOKENS, _BAILIAN_TOKENS = 512, 16  # of a block that has one id


def read_trace(path: Path) -> list[Shape]:
    """A CSV of Azure's or BurstGPT's form, or JSON lines of Mooncake's or Bailian's; from 0 s on.

    Raises ConfigurationError that names the line and the field.
    """
    try:
        with _opened(path) as file:
            first = next(file, "")
            is_json = ".jsonl" in path.suffixes or first.lstrip().startswith(("{", "["))
            lines = itertools.chain([first], file)
            shapes = list(_json_shapes(lines) if is_json else _csv_shapes(lines))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--trace: {path}: {error}") from None
    except _BadLineError as error:
        raise ConfigurationError(f"--trace: {path}: line {error}") from None
    if not shapes:
        raise ConfigurationError(f"--trace: {path}: no request in it")
    began_s = min(shape.at_s for shape in shapes)
    return [shape._replace(at_s=shape.at_s - began_s) for shape in shapes]


class _BadLineError(Exception):
    """A line that is no request: its number and what is wrong with it."""


def _opened(path: Path) -> TextIO:
    """As it is, or compressed. Where a mark of the byte order begins it, without that."""
    opened: Callable[..., TextIO] = gzip.open if path.suffix == ".gz" else open
    return opened(path, "rt", encoding="utf-8-sig", newline="")


def _csv_shapes(lines: Iterable[str]) -> Iterator[Shape]:
    """The number of a line is that of a row's last one."""
    rows = csv.DictReader(lines, skipinitialspace=True)
    try:
        form = _burstgpt if "Request tokens" in (rows.fieldnames or ()) else _Azure()
        for row in rows:
            shape = form(row)
            if shape is not None:
                yield shape
    except (ValueError, csv.Error) as error:
        raise _BadLineError(f"{rows.reader.line_num}: {error}") from None


class _Azure:
    """Of one file: nothing in it is before its first request."""

    def __init__(self) -> None:
        self._began_s: float | None = None

    def __call__(self, row: Mapping[str, object]) -> Shape:
        at_s = _moment_s(row)
        self._began_s = at_s if self._began_s is None else self._began_s
        if at_s < self._began_s:
            raise ValueError("TIMESTAMP: is before the first one: sort the lines by it")
        return Shape(at_s, _num_tokens(row, "ContextTokens"), _num_tokens(row, "GeneratedTokens"))


def _burstgpt(row: Mapping[str, object]) -> Shape | None:
    """None: it failed, and had no answer."""
    at_s = _since_s(row, "Timestamp", "seconds")
    num_output = _num_tokens(row, "Response tokens")
    return Shape(at_s, _num_tokens(row, "Request tokens"), num_output) if num_output else None


def _moment_s(row: Mapping[str, object]) -> float:
    """Of UTC where it names no zone: none of the machine's hours is missing or comes twice."""
    value = _value(row, "TIMESTAMP")
    try:
        moment = datetime.fromisoformat(str(value))  # digits beyond microseconds do not count
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise _wrong("TIMESTAMP", "a time such as 2023-11-16 18:15:46.6805900", value) from None


def _json_shapes(lines: Iterable[str]) -> Iterator[Shape]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = _json_object(line)
            shape = _bailian(row) if "chat_id" in row else _mooncake(row)
        except ValueError as error:
            raise _BadLineError(f"{number}: {error}") from None
        yield shape


def _mooncake(row: Mapping[str, object]) -> Shape:
    """One id more than the prompt has blocks does no harm; more are of blocks of another size."""
    at_s = _since_s(row, "timestamp", "milliseconds", 1000)
    lengths = _num_tokens(row, "input_length"), _num_tokens(row, "output_length")
    prefix = _block_ids(row)
    num_blocks = -(-lengths[0] // _MOONCAKE_TOKENS)
    if len(prefix) > num_blocks + 1:
        expected = f"{num_blocks} ids, one for each {_MOONCAKE_TOKENS} tokens of input_length"
        raise _wrong("hash_ids", expected, len(prefix))
    return Shape(at_s, *lengths, prefix, num_block_tokens=_MOONCAKE_TOKENS)


def _bailian(row: Mapping[str, object]) -> Shape:
    """Of the same names as Mooncake's, but in other units."""
    at_s = _since_s(row, "timestamp", "seconds")
    lengths = _num_tokens(row, "input_length"), _num_tokens(row, "output_length")
    return Shape(at_s, *lengths, _block_ids(row), num_block_tokens=_BAILIAN_TOKENS)


def _json_object(line: str) -> Mapping[str, object]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"expected an object (got {reprlib.repr(row)})")
    return row


def _since_s(row: Mapping[str, object], name: str, unit: str, units_per_s: float = 1.0) -> float:
    value = _value(row, name)
    try:
        at_s = float(value) / units_per_s  # type: ignore[arg-type]
    except (ValueError, TypeError, OverflowError):
        at_s = math.nan
    if not 0 <= at_s < math.inf:
        raise _wrong(name, f"{unit} from 0 on", value)
    return at_s


def _num_tokens(row: Mapping[str, object], name: str) -> int:
    """374.0 is what is left of a column that had gaps once."""
    value = _value(row, name)
    try:
        num_tokens = int(str(value).removesuffix(".0"))
    except ValueError:
        num_tokens = -1
    if not 0 <= num_tokens <= MOST_TOKENS:
        raise _wrong(name, f"a whole number from 0 to {MOST_TOKENS}", value)
    return num_tokens


def _block_ids(row: Mapping[str, object]) -> tuple[int, ...]:
    value = _value(row, "hash_ids")
    try:
        return tuple(map(int, value))  # type: ignore[call-overload]
    except (ValueError, TypeError, OverflowError):
        raise _wrong("hash_ids", "whole numbers", value) from None


def _value(row: Mapping[str, object], name: str) -> object:
    if row.get(name) is None:
        raise ValueError(f"{name}: is missing (there are {reprlib.repr(list(row))})")
    return row[name]


def _wrong(name: str, expected: str, value: object) -> ValueError:
    return ValueError(f"{name}: expected {expected} (got {reprlib.repr(value)})")

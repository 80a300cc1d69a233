"""Which requests come, and when: read from a trace, or drawn. Pure but for reading the file."""

import csv
import json
import math
import random
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from diptych.errors import ConfigurationError
from diptych.request_class import RequestClass

_HASHED_TOKENS = 512  # of a block that has one id in a trace with ids
_MOST_TOKENS = 10**9  # of one prompt or answer of a trace
_SHARED = 2**31  # token ids from here on are of prefixes that requests share


class Shape(NamedTuple):
    """One request of a trace. ``prefix``: ids of its blocks; equal ones are equal text."""

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    prefix: tuple[int, ...] = ()
    tenant: str = ""
    request_class: RequestClass = RequestClass.STANDARD


class Lengths(NamedTuple):
    """How a trace's lengths become ours: all divided, then clipped. Tokens."""

    divide: float = 1.0
    max_prompt: int = _MOST_TOKENS
    max_output: int = _MOST_TOKENS
    min_output: int = 2  # so that each request has a time between tokens

    def prompt(self, num_tokens: float) -> int:
        """At least one."""
        return min(self.max_prompt, max(1, round(num_tokens / self.divide)))

    def output(self, num_tokens: float) -> int:
        """At least ``min_output``."""
        return min(self.max_output, max(self.min_output, round(num_tokens / self.divide)))


class Swing(NamedTuple):
    """What changes with time: of each period the second half is unlike the first.

    ``burst_ratio`` times as many come in the first half as in the second. ``drift_ratio``: by so
    much the ratio of input to output is larger in the first half than in the second.
    """

    period_s: float = 60.0
    burst_ratio: float = 1.0
    drift_ratio: float = 1.0

    def is_first(self, at_s: float) -> bool:
        """Whether the moment is in a first half."""
        return math.fmod(at_s, self.period_s) < self.period_s / 2

    def rate(self, at_s: float) -> float:
        """Of the mean one."""
        high = 2 * self.burst_ratio / (self.burst_ratio + 1)
        return high if self.is_first(at_s) else high / self.burst_ratio

    def prompt(self, at_s: float) -> float:
        """By how much prompts are longer; outputs are as much shorter."""
        factor = math.sqrt(self.drift_ratio)
        return factor if self.is_first(at_s) else 1 / factor


def read_trace(path: Path) -> list[Shape]:
    """A CSV of Azure's form, or JSON lines of Mooncake's, by the file's name; from 0 s on.

    Raises ConfigurationError that names the line and the field.
    """
    try:
        with path.open(newline="") as file:
            read = _mooncake(file) if path.suffix == ".jsonl" else _azure(file)
            shapes = list(read)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--trace: {path}: {error}") from None
    except _BadLineError as error:
        raise ConfigurationError(f"--trace: {path}: line {error}") from None
    if not shapes:
        raise ConfigurationError(f"--trace: {path}: no request in it")
    began_s = min(shape.at_s for shape in shapes)
    return [shape._replace(at_s=shape.at_s - began_s) for shape in shapes]


class _BadLineError(Exception):
    """A line that is no request: its number and what is wrong with it."""


def _azure(lines: Iterable[str]) -> Iterator[Shape]:
    began_s: float | None = None
    for number, row in _csv_rows(lines):
        try:
            at_s = _moment_s(row)
            began_s = at_s if began_s is None else began_s
            if at_s < began_s:
                raise ValueError("TIMESTAMP: is before the first")
            lengths = _num_tokens(row, "ContextTokens"), _num_tokens(row, "GeneratedTokens")
        except ValueError as error:
            raise _BadLineError(f"{number}: {error}") from None
        yield Shape(at_s, *lengths)


def _csv_rows(lines: Iterable[str]) -> Iterator[tuple[int, Mapping[str, object]]]:
    """Each with the number of its last line."""
    rows = csv.DictReader(lines)
    try:
        for row in rows:
            yield rows.line_num, row
    except csv.Error as error:
        raise _BadLineError(f"{rows.reader.line_num}: {error}") from None


def _moment_s(row: Mapping[str, object]) -> float:
    """Of UTC where it names no zone: none of the machine's hours is missing or comes twice."""
    value = _value(row, "TIMESTAMP")
    try:
        moment = datetime.fromisoformat(str(value))  # digits beyond microseconds do not count
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise _wrong("TIMESTAMP", "a time such as 2023-11-16 18:15:46.6805900", value) from None


def _mooncake(lines: Iterable[str]) -> Iterator[Shape]:
    for number, line in enumerate(lines, 1):
        try:
            row = _json_object(line)
            shape = Shape(
                _at_s(row),
                _num_tokens(row, "input_length"),
                _num_tokens(row, "output_length"),
                _block_ids(row),
            )
        except ValueError as error:
            raise _BadLineError(f"{number}: {error}") from None
        yield shape


def _json_object(line: str) -> Mapping[str, object]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"expected an object (got {reprlib.repr(row)})")
    return row


def _at_s(row: Mapping[str, object]) -> float:
    value = _value(row, "timestamp")
    try:
        at_s = float(value) / 1000  # type: ignore[arg-type]
    except (ValueError, TypeError, OverflowError):
        at_s = math.nan
    if not 0 <= at_s < math.inf:
        raise _wrong("timestamp", "milliseconds from 0 on", value)
    return at_s


def _num_tokens(row: Mapping[str, object], name: str) -> int:
    value = _value(row, name)
    try:
        num_tokens: int = int(value)  # type: ignore[call-overload]
    except (ValueError, TypeError, OverflowError):
        num_tokens = -1
    if not 0 <= num_tokens <= _MOST_TOKENS:
        raise _wrong(name, f"a whole number from 0 to {_MOST_TOKENS}", value)
    return num_tokens


def _block_ids(row: Mapping[str, object]) -> tuple[int, ...]:
    value = _value(row, "hash_ids")
    try:
        return tuple(map(int, value))  # type: ignore[call-overload]
    except (ValueError, TypeError, OverflowError):
        raise _wrong("hash_ids", "whole numbers", value) from None


def _value(row: Mapping[str, object], name: str) -> object:
    if row.get(name) is None:
        raise ValueError(f"{name}: is missing")
    return row[name]


def _wrong(name: str, expected: str, value: object) -> ValueError:
    return ValueError(f"{name}: expected {expected} (got {reprlib.repr(value)})")


def replayed(shapes: Sequence[Shape], speed: float, duration_s: float) -> Iterator[Shape]:
    """At the trace's own times, so much faster, from its beginning again when it is over.

    Another round begins the trace's mean gap after the last request of the one before, and has
    prefixes of its own. What has no gap comes once.
    """
    ordered = sorted(shapes, key=lambda each: each.at_s)
    round_s = (ordered[-1].at_s - ordered[0].at_s + mean_gap_s(shapes)) / speed
    ids = 1 + max((max(shape.prefix, default=0) for shape in shapes), default=0)
    for turn in range(math.ceil(duration_s / round_s) if round_s else 1):
        for shape in ordered:
            at_s = turn * round_s + shape.at_s / speed
            if at_s >= duration_s:
                break
            yield shape._replace(at_s=at_s, prefix=tuple(turn * ids + p for p in shape.prefix))


def mean_gap_s(shapes: Sequence[Shape]) -> float:
    """Between requests of a trace; 0: they all come at one moment."""
    moments = [shape.at_s for shape in shapes]
    return (max(moments) - min(moments)) / max(1, len(moments) - 1)


def drawn(
    shapes: Sequence[Shape], rate: float, duration_s: float, swing: Swing, rng: random.Random
) -> Iterator[Shape]:
    """Poisson arrivals at ``rate`` per second, on average, with shapes of the trace."""
    now_s, most = 0.0, max(swing.rate(0.0), swing.rate(swing.period_s / 2))
    while (now_s := now_s + rng.expovariate(rate * most)) < duration_s:
        if rng.random() * most < swing.rate(now_s):
            yield rng.choice(shapes)._replace(at_s=now_s)


def scaled(shapes: Iterable[Shape], lengths: Lengths, swing: Swing) -> Iterator[Shape]:
    """With our lengths."""
    for shape in shapes:
        longer = swing.prompt(shape.at_s)
        yield shape._replace(
            num_prompt_tokens=lengths.prompt(shape.num_prompt_tokens * longer),
            num_output_tokens=lengths.output(shape.num_output_tokens / longer),
        )


def prompt_ids(shape: Shape, number: int, divide: float) -> list[int]:
    """Tokens of the prompt of request ``number``, at least 1: what is not shared is its own."""
    if not shape.prefix:
        return [number] * shape.num_prompt_tokens
    each = max(1, min(round(_HASHED_TOKENS / divide), shape.num_prompt_tokens))
    needed = shape.prefix[: -(-shape.num_prompt_tokens // each)]
    shared = [_SHARED + p % _SHARED for p in needed for _ in range(each)]
    own = [number] * (shape.num_prompt_tokens - len(shared))
    return [*shared, *own][: shape.num_prompt_tokens]

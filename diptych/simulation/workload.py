"""Which requests come, and when: read from a trace, or drawn. Pure but for reading the file."""

import csv
import json
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from diptych.errors import ConfigurationError
from diptych.request_class import RequestClass

_HASHED_TOKENS = 512  # of a block that has one id in a trace with ids
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
    max_prompt: int = 10**9
    max_output: int = 10**9
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
    """A CSV of Azure's form, or JSON lines of Mooncake's, by the file's name.

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
    return shapes


class _BadLineError(Exception):
    """A line that is no request: its number and what is wrong with it."""


def _azure(lines: Iterable[str]) -> Iterator[Shape]:
    began_s: float | None = None
    for number, row in enumerate(csv.DictReader(lines), 2):
        try:
            at_s = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            shape = Shape(0.0, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        except (KeyError, ValueError, TypeError) as error:
            raise _BadLineError(f"{number}: {error!r}") from None
        began_s = at_s if began_s is None else began_s
        yield _checked(number, shape._replace(at_s=at_s - began_s))


def _mooncake(lines: Iterable[str]) -> Iterator[Shape]:
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            shape = Shape(
                float(row["timestamp"]) / 1000,
                int(row["input_length"]),
                int(row["output_length"]),
                tuple(map(int, row["hash_ids"])),
            )
        except (KeyError, ValueError, TypeError) as error:
            raise _BadLineError(f"{number}: {error!r}") from None
        yield _checked(number, shape)


def _checked(number: int, shape: Shape) -> Shape:
    is_finite = math.isfinite(shape.at_s) and shape.at_s >= 0
    if not is_finite or min(shape.num_prompt_tokens, shape.num_output_tokens) < 0:
        raise _BadLineError(f"{number}: a time or a length below 0")
    return shape


def replayed(shapes: Sequence[Shape], speed: float, duration_s: float) -> Iterator[Shape]:
    """At the trace's own times, so much faster, from its beginning again when it is over.

    Another round has prefixes of its own.
    """
    length_s = max(shape.at_s for shape in shapes) / speed + 1e-3
    ids = 1 + max((max(shape.prefix, default=0) for shape in shapes), default=0)
    for turn in range(math.ceil(duration_s / length_s)):
        for shape in sorted(shapes, key=lambda each: each.at_s):
            at_s = turn * length_s + shape.at_s / speed
            if at_s >= duration_s:
                break
            yield shape._replace(at_s=at_s, prefix=tuple(turn * ids + p for p in shape.prefix))


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
    each = max(1, round(_HASHED_TOKENS / divide))
    shared = [_SHARED + p % _SHARED for p in shape.prefix for _ in range(each)]
    own = [number] * (shape.num_prompt_tokens - len(shared))
    return [*shared, *own][: shape.num_prompt_tokens]

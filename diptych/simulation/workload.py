"""Which requests come, and when: as a trace's came, or drawn. Pure."""

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from diptych.request_class import RequestClass

MOST_TOKENS = 10**9  # of one prompt or answer of a trace
_SHARED = 2**31  # token ids from here on are of prefixes that requests share


class Shape(NamedTuple):
    """One request of a trace. ``prefix``: ids of its blocks, of so many tokens each; equal ones are
    equal text.
    """

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    prefix: tuple[int, ...] = ()
    tenant: str = ""
    request_class: RequestClass = RequestClass.STANDARD
    num_block_tokens: int = 512


class Lengths(NamedTuple):
    """How a trace's lengths become ours: all divided, then clipped. Tokens."""

    divide: float = 1.0
    max_prompt: int = MOST_TOKENS
    max_output: int = MOST_TOKENS
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
    much the ratio of input to output is larger in the first half than the trace's, and smaller in
    the second.
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


def replayed(shapes: Sequence[Shape], speed: float, duration_s: float) -> Iterator[Shape]:
    """At the trace's own times, so much faster, from its beginning again when it is over.

    Another round begins the trace's mean gap after the last request of the one before, and has
    prefixes of its own. What has no gap comes once.
    """
    ordered = sorted(shapes, key=lambda each: each.at_s)
    round_s = (ordered[-1].at_s - ordered[0].at_s + mean_gap_s(shapes)) / speed
    num_ids = _num_ids(shapes)
    for turn in range(math.ceil(duration_s / round_s) if round_s else 1):
        for shape in ordered:
            at_s = turn * round_s + shape.at_s / speed
            if at_s >= duration_s:
                break
            yield _come(shape, at_s, turn * num_ids)


def _num_ids(shapes: Iterable[Shape]) -> int:
    return 1 + max((max(shape.prefix, default=0) for shape in shapes), default=0)


def _come(shape: Shape, at_s: float, first_id: int) -> Shape:
    return shape._replace(at_s=at_s, prefix=tuple(first_id + block for block in shape.prefix))


def mean_gap_s(shapes: Sequence[Shape]) -> float:
    """Between requests of a trace; 0: they all come at one moment."""
    moments = [shape.at_s for shape in shapes]
    return (max(moments) - min(moments)) / max(1, len(moments) - 1)


def drawn(
    shapes: Sequence[Shape], rate: float, duration_s: float, swing: Swing, rng: random.Random
) -> Iterator[Shape]:
    """Poisson arrivals at ``rate`` per second, on average, with shapes of the trace.

    Who is drawn again has another prefix, as in another round: it would be the same text.
    """
    num_ids, times = _num_ids(shapes), Counter[int]()
    now_s, most = 0.0, max(swing.rate(0.0), swing.rate(swing.period_s / 2))
    while (now_s := now_s + rng.expovariate(rate * most)) < duration_s:
        if rng.random() * most < swing.rate(now_s):
            place = rng.randrange(len(shapes))
            yield _come(shapes[place], now_s, times[place] * num_ids)
            times[place] += 1


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
    ids: list[int] = []
    for place, block in enumerate(shape.prefix, 1):
        num_shared = int(place * shape.num_block_tokens / divide)
        end = min(num_shared, shape.num_prompt_tokens)
        ids += [_SHARED + block % _SHARED] * (end - len(ids))
        if end == shape.num_prompt_tokens:
            break
    return [*ids, *[number] * (shape.num_prompt_tokens - len(ids))]

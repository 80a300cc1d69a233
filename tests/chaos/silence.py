"""How long clients waited without hearing anything, s."""

import itertools
from collections.abc import Iterable

from tests.call import Answer


def of_everybody(since_s: float, answers: Iterable[Answer]) -> float:
    """The longest time from ``since_s`` on in which no request at all got a token."""
    times = sorted(moment for answer in answers for moment in answer.times)
    return max(later - earlier for earlier, later in itertools.pairwise([since_s, *times]))


def of_one(since_s: float, answers: Iterable[Answer]) -> float:
    """The longest time after ``since_s`` in which one request waited for its next token."""
    gaps = [
        later - max(earlier, since_s)
        for answer in answers
        for earlier, later in itertools.pairwise([answer.sent_at, *answer.times])
    ]
    return max(gaps)

"""How long an answer may become: some lengths, and how likely each of them is. Pure."""

from collections.abc import Iterable
from typing import NamedTuple

from diptych.paced import Paced, num_outliving


class Likely(NamedTuple):
    """A length, tokens, and the share of answers that have it."""

    num_tokens: float
    share: float


class AnswerLength:
    """Of one answer, from some moment on. Immutable."""

    __slots__ = ("_likely", "halves", "num_tokens")

    def __init__(self, likely: Iterable[Likely]) -> None:
        """Lengths in ascending order, one at the least."""
        self._likely = tuple(likely)
        whole = sum(num_tokens * share for num_tokens, share in self._likely)
        self.num_tokens = max(1, round(whole / sum(share for _, share in self._likely)))
        """On average."""
        self.halves = self.halves_after(0)
        """See :meth:`halves_after`."""

    def halves_after(self, num_drawn: int) -> tuple[int, ...]:
        """Tokens that come after so many: the shorter half of such answers has the first on
        average, the longer one the second; one number where they are the same.
        """
        left = [(num - num_drawn, share) for num, share in self._likely if num > num_drawn]
        if not left:
            return (num_outliving(num_drawn),)
        half = 0.5 * sum(share for _, share in left)
        whole = sum(num * share for num, share in left)
        shorter = taken = 0.0
        for num, share in left:
            part = min(share, half - taken)
            shorter += part * num
            taken += part
        found = (max(1, round(num / half)) for num in (shorter, whole - shorter))
        return tuple(dict.fromkeys(found))

    def ways(self, paced: Paced) -> tuple[Paced, ...]:
        """How such an answer may go on, of which its worker tells.

        Its first token is not among those that it has drawn since; and who lost its place begins
        anew, but what is expected still is told without what it had before.
        """
        nums = self.halves_after(max(1 + paced.num_drawn, self.num_tokens - paced.num_more))
        return tuple(paced._replace(num_more=num, share=1.0 / len(nums)) for num in nums)

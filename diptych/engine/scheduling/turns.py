"""Whose prompt is computed next, where those of several payers wait on one worker. Pure.

Routers let requests wait in fair turns, but what they have sent ahead waits here, of several
routers and of payers that sent much at once. So steps go to the tier that was given the fewest
tokens of prompts, over its weight; within it to the payer that was given the fewest; and of a
payer's own prompts to the first that came. Who comes back is lifted to the least of those that
wait: idleness saves nothing up. That may be what ever others have who come and go; so it is lifted
to little less than the mean, and however many come pass nobody for long. Who waits and could not be
served, for it gave way or lacked blocks, is owed no more than two steps. Where all that waits is
one payer's, that is first come, first served.

Idea: virtual token counters, Sheng et al., "Fairness in Serving Large Language Models", 2024.
"""

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final, Generic, TypeVar

from diptych.engine.scheduling.sequence import Sequence

_MOST_IDLE: Final = 1024  # of whom nothing waits and whose counters are known
_MOST_STEPS_BEHIND: Final = 4  # the mean, of who comes
K = TypeVar("K", int, bytes)


class _Given(Generic[K]):
    """What each was given, tokens over weight, or what it was lifted to."""

    def __init__(self, most_behind: float) -> None:
        """``most_behind``: what all have on average nobody comes further behind than that."""
        self.tokens: dict[K, float] = {}
        self._most_behind = most_behind
        self._waiting: frozenset[K] = frozenset()  # when it was last told
        self._floor = 0.0  # the highest that was the least of those
        self._mean = 0.0  # what each had, had all that wait been given alike

    def note(self, waiting: Iterable[K]) -> None:
        """Of whom something waits now, of some at least: who comes back is lifted."""
        now, tokens = frozenset(waiting), self.tokens
        stayed = [tokens[each] for each in now & self._waiting]
        if stayed:
            self._floor = max(self._floor, min(stayed))
        entry = max(self._floor, self._mean - self._most_behind)
        for each in now:
            least = self._floor if each in self._waiting else entry
            tokens[each] = max(tokens.get(each, 0.0), least)
        self._waiting = now
        if len(tokens) > len(now) + _MOST_IDLE:
            self._forget()

    def give(self, to: K, num: float, most_owed: float) -> None:
        """So much more; who waits is no further behind than ``most_owed`` before it."""
        before = self.tokens.get(to, self._floor)
        self.tokens[to] = before + num
        self._mean = max(self._mean, self._floor) + num / max(1, len(self._waiting))
        self._floor = max(self._floor, before - most_owed)

    def _forget(self) -> None:
        """Of the idle, who has no more than it is lifted to; of too many others, the least."""
        tokens, waiting = self.tokens, self._waiting
        idle = [each for each in tokens if each not in waiting and tokens[each] > self._floor]
        idle.sort(key=lambda each: (tokens[each], each), reverse=True)
        kept = waiting.union(idle[: _MOST_IDLE // 2])
        self.tokens = {each: given for each, given in tokens.items() if each in kept}


class Turns:
    """Counts what each payer, and each tier, was given. Owned by the scheduler."""

    def __init__(self, max_batched_tokens: int) -> None:
        self._most_owed = max_batched_tokens  # before a step, and its own tokens after it
        self._most_behind = _MOST_STEPS_BEHIND * max_batched_tokens
        self._tiers = _Given[int](self._most_behind)
        self._payers: dict[int, _Given[bytes]] = {}  # by tier

    def in_turn(self, seqs: Iterable[Sequence]) -> Iterator[Sequence]:
        """Each of them, whose turn it is first; of one payer in the order in which they come.

        Who gives way comes behind all others.
        """
        all_seqs = list(seqs)
        payers: dict[int, set[bytes]] = {}
        for seq in all_seqs:
            payers.setdefault(seq.tier, set()).add(seq.payer)
        if payers:
            self._tiers.note(payers)
        for tier, waiting in payers.items():
            self._payers_of(tier).note(waiting)
        first = [seq for seq in all_seqs if not seq.gives_way]
        last = [seq for seq in all_seqs if seq.gives_way]
        is_one_payers = len(payers) == 1 and all(len(each) == 1 for each in payers.values())
        for group in (first, last):
            yield from group if is_one_payers else self._by_tier(group)

    def give(self, seq: Sequence, num_tokens: int) -> None:
        """A step computes so much of its prompt."""
        weight, most_owed = seq.tier_weight, self._most_owed
        self._tiers.give(seq.tier, num_tokens / weight, most_owed / weight)
        self._payers_of(seq.tier).give(seq.payer, num_tokens, most_owed)

    def _payers_of(self, tier: int) -> _Given[bytes]:
        if tier not in self._payers:
            self._payers[tier] = _Given(self._most_behind)
        return self._payers[tier]

    def _by_tier(self, seqs: Collection[Sequence]) -> Iterator[Sequence]:
        by_tier: dict[int, list[Sequence]] = {}
        for seq in seqs:
            by_tier.setdefault(seq.tier, []).append(seq)
        given = {tier: self._tiers.tokens[tier] for tier in by_tier}
        lines = {tier: _by_payer(own, self._payers[tier].tokens) for tier, own in by_tier.items()}
        while lines:
            tier = min(lines, key=given.__getitem__)
            first = next(lines[tier], None)
            if first is None:
                del lines[tier]
                continue
            given[tier] += first.num_pending_tokens / first.tier_weight
            yield first


def _by_payer(seqs: Collection[Sequence], given: Mapping[bytes, float]) -> Iterator[Sequence]:
    by_payer: dict[bytes, list[Sequence]] = {}
    for seq in seqs:
        by_payer.setdefault(seq.payer, []).append(seq)
    line = [  # of two with as much, who came last has waited least for others
        (given[payer], -number, 0, own) for number, (payer, own) in enumerate(by_payer.items())
    ]
    heapq.heapify(line)
    while line:
        tokens, number, at, own = line[0]
        seq = own[at]
        if at + 1 < len(own):
            tokens += seq.num_pending_tokens
            heapq.heapreplace(line, (tokens, number, at + 1, own))
        else:
            heapq.heappop(line)
        yield seq

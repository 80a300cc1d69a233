"""The best of several answers to one prompt: all are made, and a few of them told."""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from typing import Final

from diptych.token_logprobs import PromptLogprobs
from router.generation.answer import ChoiceFinished, Delta, Said
from router.request.choices import Choices, MakeSession
from router.request.response_builder import kept_bytes
from router.untaken import Taker

_EVENT_BYTES: Final = 256  # that are kept of one beside its tokens, about
_MOST_APART: Final = 64  # of a choice; then they are kept as one


@dataclass(slots=True)
class _Drawn:
    """One of them, as far as it came."""

    deltas: list[Delta] = field(default_factory=list)
    finished: ChoiceFinished | None = None
    _num_joined: int = 0  # of these, the first ones, each of which was several
    _sum: float = 0.0
    _num_tokens: int = 0

    def add(self, delta: Delta, *, tells_logprobs: bool) -> None:
        """More of it; log probabilities that nobody is told are not kept.

        Without them a token takes little by itself, and several times as much as a delta.
        """
        for found in delta.logprobs:  # one by one: the same sum, however many came at once
            self._sum += found.logprob
        self._num_tokens += len(delta.logprobs)
        self.deltas.append(delta if tells_logprobs else delta._replace(logprobs=()))
        if len(self.deltas) - self._num_joined >= _MOST_APART and not tells_logprobs:
            apart = self.deltas[self._num_joined :]
            self.deltas[self._num_joined :] = [_as_one(apart)]
            self._num_joined += 1

    @property
    def mean_logprob(self) -> float:
        """Of its tokens, whatever became of their text."""
        return self._sum / self._num_tokens if self._num_tokens else -math.inf

    def told_as(self, choice: int) -> Iterator[Delta | ChoiceFinished]:
        """All of it, as that choice."""
        for delta in self.deltas:
            yield delta._replace(choice=choice)
        assert self.finished is not None
        yield self.finished._replace(choice=choice)


class BestChoices(Choices):
    """As all the choices, of which the likeliest are told when the last has ended.

    Likeliest is by the mean of a choice's log probabilities, which its session has to be asked
    for; of two alike the first counts. From then on what is told waits for the client.
    """

    def __init__(
        self,
        num_choices: int,
        make: MakeSession,
        *,
        num_best: int,
        tells_logprobs: bool,
        taker: Taker | None = None,
    ) -> None:
        """``taker`` counts what waits for the client."""
        super().__init__(num_choices, make)
        self._num_best = num_best
        self._tells_logprobs = tells_logprobs
        self._drawn = [_Drawn() for _ in range(num_choices)]
        self._told: deque[Delta | ChoiceFinished] = deque()
        self._taker = taker
        self._num_counted = 0  # bytes of what is told
        self._num_taken = 0  # of the event that is being written

    async def next_event(self) -> PromptLogprobs | Delta | ChoiceFinished | None:
        """See ``Choices``: what is told of the prompt at once, the rest when it is certain."""
        self._uncount(self._num_taken)
        while not self._told:
            event = await super().next_event()
            match event:
                case Delta():
                    told = self._tells_logprobs
                    self._drawn[event.choice].add(event, tells_logprobs=told)
                case ChoiceFinished():
                    self._drawn[event.choice].finished = event
                    if all(each.finished for each in self._drawn):
                        self._told.extend(self._best())
                        self._drawn.clear()
                        self._count()
                case _:
                    return event
        following = self._told.popleft()
        self._num_taken = _num_bytes(following)
        return following

    def close(self) -> None:
        """See ``Choices``."""
        super().close()
        self._uncount(self._num_counted)

    def give_up(self, why: str) -> None:
        """See ``Choices``: what was told and not taken is not told any more."""
        super().give_up(why)
        self._told.clear()
        self._uncount(self._num_counted)

    def _count(self) -> None:
        if self._taker is not None:
            self._num_counted = sum(map(_num_bytes, self._told))
            self._taker.wait(self._num_counted)

    def _uncount(self, num_bytes: int) -> None:
        """So many of them were written, or will never be."""
        self._num_taken = 0
        if self._taker is not None and num_bytes:
            self._num_counted -= num_bytes
            self._taker.take(num_bytes)

    def _best(self) -> Iterator[Delta | ChoiceFinished]:
        ranked = sorted(self._drawn, key=lambda each: each.mean_logprob, reverse=True)
        for choice, each in enumerate(ranked[: self._num_best]):
            yield from each.told_as(choice)


def _as_one(deltas: list[Delta]) -> Delta:
    """What follows one another, without log probabilities."""
    return Delta(
        "",
        [token_id for delta in deltas for token_id in delta.token_ids],
        deltas[0].position,
        [margin for delta in deltas for margin in delta.margins],
    ).saying(reduce(Said.followed_by, (delta.said for delta in deltas)))


def _num_bytes(event: Delta | ChoiceFinished) -> int:
    """What is kept of it, about."""
    if isinstance(event, ChoiceFinished):
        return _EVENT_BYTES
    return _EVENT_BYTES + kept_bytes(event.token_ids, event.logprobs)

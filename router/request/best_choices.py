"""The best of several answers to one prompt: all are made, and a few of them told."""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from diptych.token_logprobs import PromptLogprobs
from router.generation.answer import ChoiceFinished, Delta
from router.request.choices import Choices, MakeSession


@dataclass(slots=True)
class _Drawn:
    """One of them, as far as it came."""

    deltas: list[Delta] = field(default_factory=list)
    finished: ChoiceFinished | None = None
    _sum: float = 0.0
    _num_tokens: int = 0

    def add(self, delta: Delta, *, tells_logprobs: bool) -> None:
        """More of it; log probabilities that nobody is told are not kept."""
        for found in delta.logprobs:  # one by one: the same sum, however many came at once
            self._sum += found.logprob
        self._num_tokens += len(delta.logprobs)
        self.deltas.append(delta if tells_logprobs else delta._replace(logprobs=()))

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
    for; of two alike the first counts.
    """

    def __init__(
        self, num_choices: int, make: MakeSession, *, num_best: int, tells_logprobs: bool
    ) -> None:
        super().__init__(num_choices, make)
        self._num_best = num_best
        self._tells_logprobs = tells_logprobs
        self._drawn = [_Drawn() for _ in range(num_choices)]
        self._told: deque[Delta | ChoiceFinished] = deque()

    async def next_event(self) -> PromptLogprobs | Delta | ChoiceFinished | None:
        """See ``Choices``: what is told of the prompt at once, the rest when it is certain."""
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
                case _:
                    return event
        return self._told.popleft()

    def _best(self) -> Iterator[Delta | ChoiceFinished]:
        ranked = sorted(self._drawn, key=lambda each: each.mean_logprob, reverse=True)
        for choice, each in enumerate(ranked[: self._num_best]):
            yield from each.told_as(choice)

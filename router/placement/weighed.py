"""The candidates of one request, and which of them lose the least. Pure."""

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from operator import itemgetter
from typing import Final, NamedTuple

from router.placement.forecast import DecodeForecast, PrefillForecast, Queue, Span
from router.placement.loss import NO_TOLL, Toll
from router.placement.placement import Outlook
from router.placement.told_paces import ToldPaces
from router.placement.views import DecodeView, PrefillView, WorkerId

PER_OBJECTIVE: Final = 20  # differences that are smaller are left to seconds
_ROUNDING: Final = 1e-9  # of what is added in another order


class Loss(NamedTuple):
    """What a candidate costs all whom it concerns; the least is the best."""

    objectives: int  # twentieths of one that is missed because of it, by expectation
    seconds: float
    rank: bytes  # among equals


Candidate = tuple[Loss, Outlook]
_loss = itemgetter(0)


class Least(NamedTuple):
    """What one of a pair costs at the least, whatever the other one is; or a candidate."""

    objectives: float
    seconds: float


_NOTHING: Final = Least(0.0, 0.0)


class Decoder(NamedTuple):
    """A worker that would decode."""

    view: DecodeView
    pace: DecodeForecast
    told: ToldPaces
    num_kept_out: float  # prompts that ought to be computed there, and could not be
    rank: bytes  # among equals


class Target(NamedTuple):
    """One that would decode what another worker computes."""

    decoder: Decoder
    may_be_alone: bool  # it may compute the prompt itself, and can tell what that takes
    num_missing: int = 0  # tokens
    step_s: float = 0.0  # that runs there when they have come, without prompts; 0: none does
    prompts: Queue = Queue()  # that it was given
    toll: Toll = NO_TOLL
    against: float = 0.0
    least: Least = _NOTHING  # of each of its pairs

    @property
    def worker(self) -> WorkerId:
        return self.decoder.view.worker

    @property
    def least_alone(self) -> Least:
        """Of it alone: where it computes the prompt, too, no fewer of those that it told of miss
        their pace. Of those that it has not told of it may be fewer, as what all lose alike makes
        them likelier to be as late as is expected.
        """
        missed = self.toll.missed
        num_lost = self.least.objectives - missed.num_all + missed.num_told
        return Least(num_lost, self.least.seconds)


class Source(NamedTuple):
    """A worker that would compute a prompt for another one."""

    view: PrefillView
    num_computed: int  # of the prompt's tokens, the last ones
    computed: PrefillForecast
    first_token: Span  # with what it takes beside steps
    late_ratio: float  # how likely that is later than it is wanted
    targets: Sequence[Target]  # for which it would; there are some
    rank: bytes  # among equals


class Beside(NamedTuple):
    """What computing a prompt costs those that decode on its source."""

    toll: Toll = NO_TOLL
    against: float = 0.0  # objectives that speak against it, beside those that are missed


# Candidates, behind what each of them costs at the least, as of a Loss, and a number: a pair, a
# target alone, or all pairs of a source. A plain tuple: each placement makes hundreds.
_Bounded = tuple[tuple[int, float], int, Source | None, Target | None]


class Weighed:
    """The candidates of one request.

    One is looked at in full where its parts do not tell already that it is none of the best. What
    the prompt costs those that decode on a source is worked out where that may be of any matter.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        sources: Sequence[Source],
        look: Callable[[Source | None, Target], Candidate],
        beside: Callable[[Source], Beside],
    ) -> None:
        """Of all pairs of ``sources``, and of ``targets`` that may be alone; ``look`` is at one of
        those, and at one of these without a source.
        """
        self._targets, self._sources = targets, sources
        self._alone = [target for target in targets if target.may_be_alone]
        self._look, self._beside = look, beside

    def __len__(self) -> int:
        return len(self._alone) + sum(len(source.targets) for source in self._sources)

    @property
    def soonest_s(self) -> float | None:
        """When the first token would come of whichever has it first; None: there is none."""
        alone = (self._look(None, target)[1].ttft_s for target in self._alone)
        pairs = (source.first_token.expected_s for source in self._sources)
        return min((*alone, *pairs), default=None)

    def best(self, num: int) -> list[Candidate]:
        """So many that lose the least, in that order; fewer: there are no more."""
        if len(self) <= num:
            return sorted(self.where(lambda *_: True), key=_loss)
        found: list[Candidate] = []
        numbers = count()
        left = self._bounded(numbers)
        heapify(left)  # few of them are looked at
        while left:
            least, _, source, target = heappop(left)
            if len(found) == num and least > found[-1][0][:2]:
                break
            if target is not None:
                insort(found, self._look(source, target), key=_loss)
                del found[num:]
            elif source is not None:
                for pair in self._pairs(source, numbers):
                    heappush(left, pair)
        return found

    def where(self, is_wanted: Callable[[WorkerId | None, WorkerId], bool]) -> list[Candidate]:
        """Those on such workers: for the prompt (None: the other one), and to decode."""
        alone: list[tuple[Source | None, Target]] = [(None, target) for target in self._alone]
        pairs = [(source, target) for source in self._sources for target in source.targets]
        return [
            self._look(source, target)
            for source, target in [*alone, *pairs]
            if is_wanted(None if source is None else source.view.worker, target.worker)
        ]

    def _bounded(self, numbers: Iterator[int]) -> list[_Bounded]:
        """All: each target alone, and the pairs of each source together."""
        left: list[_Bounded] = [
            (_at_least(*target.least_alone), next(numbers), None, target) for target in self._alone
        ]
        leasts = [target.least for target in self._targets]
        num_lost = min((least.objectives for least in leasts), default=0.0)
        seconds = min((least.seconds for least in leasts), default=0.0)
        for source in self._sources:
            first_s = source.first_token.expected_s
            least = _at_least(num_lost + source.late_ratio, seconds + first_s)
            left.append((least, next(numbers), source, None))
        return left

    def _pairs(self, source: Source, numbers: Iterator[int]) -> Iterator[_Bounded]:
        toll, against = self._beside(source)
        num_lost = source.late_ratio + toll.missed.num_all + against
        seconds = source.first_token.expected_s + toll.seconds
        for target in source.targets:
            their_lost, their_s = target.least
            least = _at_least(num_lost + their_lost, seconds + their_s)
            yield least, next(numbers), source, target


def _at_least(num_lost: float, seconds: float) -> tuple[int, float]:
    """As of a Loss, of which the parts are added in another order."""
    return round((num_lost - _ROUNDING) * PER_OBJECTIVE), seconds * (1.0 - _ROUNDING)

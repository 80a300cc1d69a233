"""How long answers will be, by how long a tenant's were of late. Pure.

Of each tenant and class a histogram whose past fades; of a class where a tenant has too few.
``max_tokens`` is what a client allows, not what it gets, so it bounds an estimate and is none; and
an answer that it cut off says only that it would have been longer. So each length is as likely as
it was among those answers that could have been so long (Kaplan and Meier's estimator).
"""

import math
from collections import OrderedDict
from typing import Final

from diptych.paced import num_outliving
from diptych.request_class import RequestClass
from router.placement.answer_length import AnswerLength, Likely

UNKNOWN_TOKENS: Final = 128  # that an answer is taken to have while nothing is known
MAX_HISTOGRAMS: Final = 1024  # beside one for each class; who was not seen for longest is forgotten

_NUM_BUCKETS: Final = 24  # two for each doubling: up to 4096 tokens, and those above
_FADING: Final = 0.99  # weight of the past against one more answer
_MOST_ASKED: Final = 16  # that are remembered: those that wait ask again and again
_LEAST_WEIGHT: Final = 4.0  # of answers, before a histogram is believed
_LEAST_AT_RISK: Final = 0.5  # of answers: what fewer were as long says nothing
_NOTHING: Final = 1e-9  # a share of this size is an error of rounding


class _Bucket:
    """Answers of about one length: their weight and that of their tokens."""

    __slots__ = ("num_tokens", "weight")

    def __init__(self) -> None:
        self.weight = 0.0
        self.num_tokens = 0.0

    def fade(self) -> None:
        self.weight *= _FADING
        self.num_tokens *= _FADING

    def add(self, num_tokens: int) -> None:
        self.weight += 1.0
        self.num_tokens += num_tokens

    @property
    def length(self) -> float:
        return self.num_tokens / self.weight


class _Histogram:
    """Answers' lengths: of those that ended by themselves, and of those that were cut off."""

    def __init__(self) -> None:
        self._whole = [_Bucket() for _ in range(_NUM_BUCKETS)]
        self._cut = [_Bucket() for _ in range(_NUM_BUCKETS)]
        self._seen: dict[_Bucket, None] = {}  # of all of these, those with answers
        self.weight = 0.0
        self._whole_weight = 0.0  # of this, of those that ended by themselves
        self._tells_up_to = 0.0  # tokens, as of the last answer; see ``tells``
        self._likely: list[Likely] | None = None  # as of the last answer; None: not asked since
        self._asked: dict[tuple[int, int], AnswerLength] = {}  # likewise

    def learn(self, num_tokens: int, *, is_cut: bool) -> None:
        self._likely = None
        self._asked.clear()
        for bucket in self._seen:
            bucket.fade()
        bucket = (self._cut if is_cut else self._whole)[_place_of(num_tokens)]
        bucket.add(num_tokens)
        self._seen[bucket] = None
        self.weight = _FADING * self.weight + 1.0
        self._whole_weight = _FADING * self._whole_weight + (not is_cut)
        self._tells_up_to = self._most_told()

    def tells(self, at_most: int) -> bool:
        """Whether some ended by themselves, or were cut off no sooner than this one will be."""
        return at_most <= self._tells_up_to

    def _most_told(self) -> float:
        if self._whole_weight >= _LEAST_AT_RISK:
            return math.inf
        likely = (bucket for bucket in self._cut if bucket.weight >= _LEAST_AT_RISK)
        return max((bucket.length for bucket in likely), default=0.0)

    def to_come(self, at_most: int, so_far: int) -> AnswerLength:
        """Of answers that are longer than ``so_far``, which is less than ``at_most``, and are cut
        off there.
        """
        found = self._asked.get((at_most, so_far))
        if found is None:
            if len(self._asked) >= _MOST_ASKED:
                self._asked.clear()
            found = self._asked[at_most, so_far] = self._to_come(at_most, so_far)
        return found

    def _to_come(self, at_most: int, so_far: int) -> AnswerLength:
        if self._likely is None:
            self._likely = self._lengths()
        longer = [
            Likely(min(num_tokens, at_most) - so_far, share)
            for num_tokens, share in self._likely
            if num_tokens > so_far
        ]
        return AnswerLength(longer or [Likely(min(num_outliving(so_far), at_most - so_far), 1.0)])

    def _lengths(self) -> list[Likely]:
        """Those that nobody saw end are as long as the longest, and as one of which nothing is
        known at the least.
        """
        found: list[Likely] = []
        left, num_as_long, longest = 1.0, self.weight, 0.0
        for whole, cut in zip(self._whole, self._cut, strict=True):
            if whole.weight:
                share = left * min(1.0, whole.weight / num_as_long)
                if share >= _NOTHING:
                    found.append(Likely(whole.length, share))
                    longest = whole.length
                left -= share
            if cut.weight:
                longest = max(longest, cut.length)
            num_as_long -= whole.weight + cut.weight
            if left < _NOTHING or num_as_long < _LEAST_AT_RISK:
                break
        if left >= _NOTHING:
            found.append(Likely(max(longest, UNKNOWN_TOKENS), left))
        return found


class OutputLengths:
    """Learns from answers that ended. Event loop only; bounded, whoever asks."""

    def __init__(self) -> None:
        self._of_classes = {each: _Histogram() for each in RequestClass}
        self._of_tenants: OrderedDict[tuple[RequestClass, str], _Histogram] = OrderedDict()

    def learn(
        self, request_class: RequestClass, tenant: str, num_tokens: int, *, is_cut: bool = False
    ) -> None:
        """An answer to a request of that class and tenant had so many tokens; ``is_cut``: as it
        might have no more.
        """
        self._of_classes[request_class].learn(num_tokens, is_cut=is_cut)
        key = (request_class, tenant)
        histogram = self._of_tenants.get(key)
        if histogram is None:
            histogram = self._of_tenants[key] = _Histogram()
        histogram.learn(num_tokens, is_cut=is_cut)
        self._of_tenants.move_to_end(key)
        if len(self._of_tenants) > MAX_HISTOGRAMS:
            self._of_tenants.popitem(last=False)

    def to_come(
        self, request_class: RequestClass, tenant: str, at_most: int, so_far: int = 0
    ) -> AnswerLength:
        """Of an answer that may have ``at_most`` tokens and has ``so_far``; one at the least."""
        at_most = max(at_most, so_far + 1)
        tenants = self._of_tenants.get((request_class, tenant))
        if tenants is not None and tenants.weight >= _LEAST_WEIGHT and tenants.tells(at_most):
            return tenants.to_come(at_most, so_far)
        classes = self._of_classes[request_class]
        if classes.weight >= _LEAST_WEIGHT:
            return classes.to_come(at_most, so_far)
        return AnswerLength([Likely(min(UNKNOWN_TOKENS, at_most - so_far), 1.0)])


def _place_of(num_tokens: int) -> int:
    """1; 2; 3; 4, 5; 6, 7; 8 to 11; 12 to 15; and so on."""
    if num_tokens < 2:
        return 0
    doublings = num_tokens.bit_length() - 1
    is_upper_half = (num_tokens >> (doublings - 1)) & 1
    return min(2 * doublings - 1 + is_upper_half, _NUM_BUCKETS - 1)

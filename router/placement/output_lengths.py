"""How long answers will be, by how long a tenant's were of late. Pure.

Of each tenant and class a histogram whose past fades; of a class where a tenant has too few.
``max_tokens`` is what a client allows, not what it gets, so it bounds an estimate and is none.
"""

from collections import OrderedDict
from typing import Final

from diptych.request_class import RequestClass

UNKNOWN_TOKENS: Final = 128  # that an answer is taken to have while nothing is known
MAX_HISTOGRAMS: Final = 1024  # beside one for each class; who was not seen for longest is forgotten

_NUM_BUCKETS: Final = 24  # two for each doubling: up to 4096 tokens, and those above
_FADING: Final = 0.99  # weight of the past against one more answer
_MOST_MEANS: Final = 64  # that are remembered: those that wait ask again and again
_LEAST_WEIGHT: Final = 4.0  # of answers, before a histogram is believed


class _Histogram:
    """Answers' lengths: of each bucket the weight of the answers, and of their tokens."""

    def __init__(self) -> None:
        self._weights = [0.0] * _NUM_BUCKETS
        self._tokens = [0.0] * _NUM_BUCKETS
        self.weight = 0.0
        self._means: dict[int, float] = {}  # as asked since the last answer

    def learn(self, num_tokens: int) -> None:
        self._means.clear()
        self._weights = [_FADING * each for each in self._weights]
        self._tokens = [_FADING * each for each in self._tokens]
        bucket = _bucket_of(num_tokens)
        self._weights[bucket] += 1.0
        self._tokens[bucket] += num_tokens
        self.weight = _FADING * self.weight + 1.0

    def mean(self, at_most: int) -> float:
        """Of answers that are cut off there."""
        found = self._means.get(at_most)
        if found is None:
            pairs = zip(self._weights, self._tokens, strict=True)
            cut = (min(tokens, weight * at_most) for weight, tokens in pairs)
            found = sum(cut) / self.weight
            if len(self._means) < _MOST_MEANS:
                self._means[at_most] = found
        return found


class OutputLengths:
    """Learns from answers that ended. Event loop only; bounded, whoever asks."""

    def __init__(self) -> None:
        self._of_classes = {each: _Histogram() for each in RequestClass}
        self._of_tenants: OrderedDict[tuple[RequestClass, str], _Histogram] = OrderedDict()

    def learn(self, request_class: RequestClass, tenant: str, num_tokens: int) -> None:
        """An answer to a request of that class and tenant had so many tokens."""
        self._of_classes[request_class].learn(num_tokens)
        histogram = self._of_tenants.setdefault((request_class, tenant), _Histogram())
        histogram.learn(num_tokens)
        self._of_tenants.move_to_end((request_class, tenant))
        if len(self._of_tenants) > MAX_HISTOGRAMS:
            self._of_tenants.popitem(last=False)

    def expected(self, request_class: RequestClass, tenant: str, at_most: int) -> int:
        """Tokens of an answer that may have ``at_most``; at least 1."""
        for histogram in (
            self._of_tenants.get((request_class, tenant)),
            self._of_classes[request_class],
        ):
            if histogram is not None and histogram.weight >= _LEAST_WEIGHT:
                return max(1, round(histogram.mean(at_most)))
        return max(1, min(UNKNOWN_TOKENS, at_most))


def _bucket_of(num_tokens: int) -> int:
    """1; 2; 3; 4, 5; 6, 7; 8 to 11; 12 to 15; and so on."""
    if num_tokens < 2:
        return 0
    doublings = num_tokens.bit_length() - 1
    is_upper_half = (num_tokens >> (doublings - 1)) & 1
    return min(2 * doublings - 1 + is_upper_half, _NUM_BUCKETS - 1)

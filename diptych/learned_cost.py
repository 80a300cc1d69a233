"""What a kind of work costs, learned from how long it took. Pure.

The cost is a sum: each feature of the work times a coefficient that is not negative. It is
fitted by least squares in *relative* errors with exponential forgetting, so that a step of 40 ms
counts as much as one of 600 ms and a machine that changed is learned anew; a measurement far
above what was expected counts as a bound says, as it says more of the machine's neighbours than
of the work. The *pace* follows within some ten measurements what the whole sum lags behind, such
as a neighbour that takes half of the core for a minute; costs on one machine share the greater
part of it, as what slows one slows the others. Beside them stands the ratio that nine
of ten measurements did not exceed: that of the first ones in order of size, then moved up at each
one that did and down at each that did not (Gibbs and Candès: adaptive conformal inference), which
needs no assumption of how they are spread.

What the latest thousands of measurements do not tell stays as it was learned before; of a machine
whose speed has changed that is told wrongly until such work comes again.
"""

import bisect
import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

_FORGETTING = 0.999  # weight of the past against one more measurement
_COVERED = 0.9
_FIRST_UPPER_RATIO = 1.5  # until anything is known; the first ones' is no larger
_NUM_FITTING = 8  # measurements that say little of the others' spread
_NUM_RANKED = 40  # after those, before the upper ratio moves by steps
_RATIO_STEP = 0.01  # of the upper ratio's logarithm
_MOST_ABOVE = 2.0  # a measurement counts as so many times the expected cost at the most ...
_NUM_TRUSTING = 16  # ... after this many
_PACE_WEIGHT = 0.1  # of the newest measurement in the pace's logarithm, ...
_FIRST_SHARED_WEIGHT = 0.1  # ... and in that of all costs on its machine, ...
_LEAST_SHARED_WEIGHT, _MOST_SHARED_WEIGHT = 0.01, 0.3
_WEIGHT_RATIO = 1.03  # ... by so much more at each one that is off to the same side, or less, ...
_SHARED_KEPT = 0.99  # ... and so much of that is left at the next one, ...
_MOST_SHARED = math.log(4.0)
_MOST_OFF_PACE = 0.5  # ... which is moved by so much of a logarithm at the most
_NUM_DOUBTING = 8  # measurements after what is doubted ...
_CLEARLY_FAST = math.log(1.25)  # ... of which two in a row that are faster by so much, and by ...
_DOUBTED_WEIGHT = 0.5  # ... more than is usual, move all that was learned so much of the way
_MOST_UNSOLVED = 16  # measurements between two solutions
_RIDGE = 1e-6  # of each feature's weight: it holds what measurements leave open
_MOST_WEIGHT = 1e50  # of a measurement; then all sums are made smaller
_FORGOTTEN = 1e-200  # a feature's sum, at the most, of which too little is left to say anything


class LearnedSum(NamedTuple):
    """What was learned until now. ``upper_ratio``: nine of ten took at most so many times more."""

    coefficients: tuple[float, ...]  # s per unit of each feature
    upper_ratio: float
    num_samples: int


class MachinePace:
    """Of several costs on one machine: what slows one is taken to slow the others as much.

    How much of a measurement that differs is the pace's and how much the measurement's own is
    learned too: while measurements are off to the same side in a row the pace follows too slowly,
    while they are by turns it follows too fast, as what a filter with the right gain leaves is not
    correlated (Mehra, 1970).

    What lasts for more than a hundred measurements is left to each cost itself: of a kind of work
    that does not come meanwhile nothing is known of that.
    """

    def __init__(self) -> None:
        self.log = 0.0  # of the latest measurements to the sums
        self._weight = _FIRST_SHARED_WEIGHT
        self._last_off = 0.0

    def follow(self, log_off: float) -> None:
        """A measurement, of any cost, was so far off what was expected at the pace until now."""
        log = _SHARED_KEPT * self.log + self._weight * log_off
        self.log = max(-_MOST_SHARED, min(_MOST_SHARED, log))
        both_sides = log_off * self._last_off
        if both_sides:
            times = _WEIGHT_RATIO if both_sides > 0.0 else 1.0 / _WEIGHT_RATIO
            self._weight = max(_LEAST_SHARED_WEIGHT, min(_MOST_SHARED_WEIGHT, times * self._weight))
        self._last_off = log_off


class LearnedCost:
    """One cost with ``num_features``. Owned by whoever measures; 3 to 8 µs a measurement.

    One that is learned beside others on a machine has a part of its pace from them.

    Of a feature that was never seen the coefficient is 0. Where measurements cannot tell
    features apart (all work was alike from the first on), each has its part of the cost.
    """

    def __init__(self, num_features: int) -> None:
        self._products = [[0.0] * num_features for _ in range(num_features)]  # faded sums
        self._targets = [0.0] * num_features
        self._coefficients = [0.0] * num_features
        self._own_log_pace = 0.0  # of the latest measurements to the sum, beside the machine's
        self._machine: MachinePace | None = None
        self._log_upper = math.log(_FIRST_UPPER_RATIO)
        self._ranked: list[float] = []  # the first measurements' logarithms to what was expected
        self._num_samples = 0
        self._num_doubting = 0  # measurements to come
        self._log_fast = 0.0  # of the last measurement, if it was that fast
        self._num_unsolved = 0
        self._weight = 1.0  # of the newest measurement in the sums

    @property
    def num_samples(self) -> int:
        return self._num_samples

    @property
    def learned(self) -> LearnedSum:
        """As of now, at the pace of now."""
        pace = math.exp(self._log_pace)
        return LearnedSum(
            tuple(pace * each for each in self._coefficients),
            math.exp(self._log_upper),
            self._num_samples,
        )

    def expected_s(self, features: Sequence[float]) -> float:
        """The cost of such work at the pace of now; 0 until anything is known of it."""
        return self._sum_s(features) * math.exp(self._log_pace)

    def join(self, machine: MachinePace) -> None:
        """From now on it is learned beside others there."""
        self._machine = machine

    def doubt(self) -> None:
        """What was measured until now may have been slowed: the next fast ones are believed."""
        self._num_doubting = _NUM_DOUBTING

    def learn(self, features: Sequence[float], measured_s: float) -> None:
        """Such work took ``measured_s``; not positive: nothing is learned of it."""
        if measured_s <= 0.0:
            return
        if self._machine is not None and self._num_samples <= _NUM_TRUSTING:
            self._own_log_pace = -self._machine.log  # what is known of it was measured at that pace
        expected_s = self._sum_s(features)
        if expected_s > 0.0:
            self._follow(math.log(measured_s / expected_s) - self._log_pace)
        self._num_samples += 1
        is_trusted = expected_s > 0.0 and self._num_samples > _NUM_TRUSTING
        scale_s = expected_s if is_trusted else measured_s
        self._add(features, scale_s, min(measured_s / scale_s, _MOST_ABOVE))
        self._num_unsolved += 1
        if self._num_unsolved >= min(_MOST_UNSOLVED, 1 + self._num_samples // _MOST_UNSOLVED):
            self._num_unsolved = 0
            self._coefficients = _least_squares(self._products, self._targets, self._coefficients)

    @property
    def _log_pace(self) -> float:
        return self._own_log_pace + (0.0 if self._machine is None else self._machine.log)

    def _sum_s(self, features: Sequence[float]) -> float:
        return math.fsum(c * x for c, x in zip(self._coefficients, features, strict=True))

    def _add(self, features: Sequence[float], scale_s: float, target: float) -> None:
        """Newer ones weigh more instead of older ones less: so features of 0 need nothing done."""
        self._weight /= _FORGETTING
        if self._weight > _MOST_WEIGHT:
            self._fade(1.0 / self._weight)
        there = [(index, value / scale_s) for index, value in enumerate(features) if value]
        for index, value in there:
            products, weighted = self._products[index], self._weight * value
            for other, factor in there:
                products[other] += weighted * factor
            self._targets[index] += weighted * target

    def _fade(self, factor: float) -> None:
        self._weight *= factor
        self._targets = [factor * each for each in self._targets]
        self._products = [[factor * each for each in row] for row in self._products]

    def _follow(self, log_ratio: float) -> None:
        """A measurement was so much above what was expected at the pace until now."""
        if self._num_samples >= _NUM_FITTING and len(self._ranked) < _NUM_RANKED:
            bisect.insort(self._ranked, log_ratio)
            num = len(self._ranked)
            upper = self._ranked[min(num, math.ceil(_COVERED * (num + 1))) - 1]
            self._log_upper = max(0.0, min(upper, math.log(_FIRST_UPPER_RATIO)))
        elif self._ranked:
            is_above = log_ratio > self._log_upper
            self._log_upper = max(0.0, self._log_upper + _RATIO_STEP * (is_above - (1 - _COVERED)))
        if self._num_samples > _NUM_TRUSTING:
            off_pace = max(-_MOST_OFF_PACE, min(_MOST_OFF_PACE, log_ratio))
            both_fast = max(self._log_fast, off_pace)
            if both_fast < 0.0 and self._num_doubting:
                self._take_faster(math.exp(_DOUBTED_WEIGHT * both_fast))
            else:
                self._move_pace(off_pace)
            is_fast = log_ratio < -max(_CLEARLY_FAST, self._log_upper)
            self._log_fast = off_pace if is_fast else 0.0
        self._num_doubting = max(0, self._num_doubting - 1)

    def _move_pace(self, off_pace: float) -> None:
        """What is doubted says nothing of the machine: maybe it alone was measured slow."""
        self._own_log_pace += _PACE_WEIGHT * off_pace
        if self._machine is not None and not self._num_doubting:
            self._machine.follow(off_pace)

    def _take_faster(self, ratio: float) -> None:
        """As if all had taken so much of what it took: unlike the pace, that does not come back."""
        self._targets = [ratio * each for each in self._targets]
        self._coefficients = [ratio * each for each in self._coefficients]


def _least_squares(
    products: list[list[float]], targets: list[float], before: list[float]
) -> list[float]:
    """The coefficients that fit best of those that are not negative: the worst leaves, in turn.

    What is left open stays as ``before``, as much faster or slower as all else has become.
    """
    before = _at_this_speed(products, targets, before)
    found, kept = list(before), []
    for index, products_of_it in enumerate(products):
        if products_of_it[index] > _FORGOTTEN:
            found[index] = 0.0
            kept.append(index)
    while kept:
        solved = _solve(products, targets, before, kept)
        worst = min(range(len(kept)), key=lambda place: solved[place])
        if solved[worst] >= 0.0:
            for index, value in zip(kept, solved, strict=True):
                found[index] = value
            break
        del kept[worst]
    return found


def _at_this_speed(
    products: list[list[float]], targets: list[float], before: list[float]
) -> list[float]:
    """``before`` times what fits best."""
    taken = math.fsum(map(operator.mul, before, targets))
    expected = math.fsum(
        each * math.fsum(map(operator.mul, row, before))
        for each, row in zip(before, products, strict=True)
    )
    ratio = taken / expected if taken > 0.0 and expected > 0.0 else 1.0
    return [ratio * each for each in before]


def _solve(
    products: list[list[float]], targets: list[float], before: list[float], kept: list[int]
) -> list[float]:
    """By elimination; features are brought to one size before, and a little ridge is added."""
    sizes = [math.sqrt(products[index][index]) for index in kept]
    rows = [
        [
            products[i][j] / (sizes[a] * sizes[b]) + (_RIDGE if i == j else 0.0)
            for b, j in enumerate(kept)
        ]
        + [targets[i] / sizes[a] + _RIDGE * before[i] * sizes[a]]
        for a, i in enumerate(kept)
    ]
    for pivot, row in enumerate(rows):  # positive definite: no pivoting is needed
        for lower in rows[pivot + 1 :]:
            factor = lower[pivot] / row[pivot]
            for column in range(pivot, len(row)):
                lower[column] -= factor * row[column]
    found = [0.0] * len(rows)
    for pivot in reversed(range(len(rows))):
        row = rows[pivot]
        rest = math.fsum(row[column] * found[column] for column in range(pivot + 1, len(rows)))
        found[pivot] = (row[-1] - rest) / row[pivot]
    return [value / size for value, size in zip(found, sizes, strict=True)]

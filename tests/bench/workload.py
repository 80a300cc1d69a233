"""The load of the goodput benchmark, measured or simulated: when requests come, and how long."""

import random
from collections.abc import Sequence

from diptych.errors import ConfigurationError
from tests.bench.slo import Lengths


class Workload:
    """The same arrivals, lengths and prompts for every deployment."""

    def __init__(
        self, lengths: Sequence[Lengths], vocab: int, moments_s: Sequence[float] = ()
    ) -> None:
        """``moments_s``: of the requests with these lengths, in any order; without it they come by
        chance.
        """
        if moments_s:
            in_order = sorted(range(len(moments_s)), key=lambda index: moments_s[index])
            lengths = [lengths[index] for index in in_order]
            moments_s = [moments_s[index] for index in in_order]
        self._lengths, self._vocab, self._moments_s = lengths, vocab, moments_s

    def arrivals(
        self, rate: float, duration_s: float, seed: int = 11
    ) -> list[tuple[float, Lengths]]:
        """(seconds after the start, lengths) of each request.

        Poisson at ``rate`` per second, of lengths drawn by chance; or a part of the trace, with
        its own moments, as much faster as makes them so many per second.
        """
        if self._moments_s:
            return self._of_trace(rate, duration_s, seed)
        rng, now, result = random.Random(seed), 0.0, []
        while (now := now + rng.expovariate(rate)) < duration_s:
            result.append((now, rng.choice(self._lengths)))
        return result

    def _of_trace(self, rate: float, duration_s: float, seed: int) -> list[tuple[float, Lengths]]:
        num = round(rate * duration_s)
        if len(self._lengths) <= num:
            raise ConfigurationError(f"--duration: the trace has {len(self._lengths)} requests")
        first = random.Random(seed).randrange(len(self._lengths) - num)
        begin_s, end_s = self._moments_s[first], self._moments_s[first + num]
        faster = duration_s / max(end_s - begin_s, 1e-9)
        return [
            ((self._moments_s[index] - begin_s) * faster, self._lengths[index])
            for index in range(first, first + num)
        ]

    def prompt(self, num_tokens: int, rng: random.Random) -> list[int]:
        return [rng.randrange(100, self._vocab) for _ in range(num_tokens)]

"""What tenants and classes get of a cluster that they keep busy, simulated.

    python -m tests.bench.simulated_tenants [NAME...] [--placement predicted] [--runway SECONDS]

Two prefill and two decode workers of the demo model, one router, more requests than can be
served. A share is of the engines' seconds, of those whose first token came in the span that is
looked at, as the router charges them. ``--runway``: seconds of prompts that the router lets wait on
one prefill worker.
"""

import argparse
import heapq
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal, NamedTuple

from diptych.request_class import RequestClass
from diptych.simulation.cluster import Split, Workers
from diptych.simulation.engine import EngineLimits
from diptych.simulation.journey import Journey
from diptych.simulation.measured_steps import DEMO
from diptych.simulation.router import RouterLimits
from diptych.simulation.simulation import Placing, Setup, Simulation
from diptych.simulation.workload import Shape
from diptych.step_model import StepWork

REALTIME, STANDARD, BATCH = RequestClass
_SPLIT: Final = Split(2, 2)
_LIMITS: Final = EngineLimits(max_batched_tokens=512, max_model_len=2048)
_DRAIN_S: Final = 10.0
_SEED: Final = 3
CHUNK_S: Final = DEMO.prefill.expected_s(StepWork.of_prompt(_LIMITS.max_batched_tokens, 0))


class Source(NamedTuple):
    """Poisson arrivals of one tenant; lengths are half as much more or less."""

    tenant: str
    rate: float  # requests per second
    num_prompt_tokens: int = 256
    request_class: RequestClass = STANDARD
    pause_s: tuple[float, float] = (0.0, 0.0)  # in which it sends nothing
    num_output_tokens: int = 32

    def arrivals(self, length_s: float) -> Iterator[Shape]:
        """The same whoever else sends."""
        rng, at_s = random.Random(f"{self.tenant} {_SEED}"), 0.0
        while (at_s := at_s + rng.expovariate(self.rate)) < length_s:
            num_prompt, num_output = (
                rng.randrange(mean // 2, mean * 3 // 2)
                for mean in (self.num_prompt_tokens, self.num_output_tokens)
            )
            if not self.pause_s[0] <= at_s < self.pause_s[1]:
                yield Shape(
                    at_s,
                    num_prompt,
                    num_output,
                    tenant=self.tenant,
                    request_class=self.request_class,
                )


class Bench(NamedTuple):
    """How it is placed."""

    placement: Literal["least-loaded", "predicted"] = "least-loaded"
    runway: float = RouterLimits().prefill_runway_s

    def run(self, sources: Sequence[Source], length_s: float) -> "Served":
        """Nothing is refused for want of a place in the queue."""
        setup = Setup(
            _SPLIT,
            Workers(_LIMITS, _LIMITS, DEMO),
            limits=RouterLimits(100_000, prefill_runway_s=self.runway),
            placing=Placing(self.placement),
            seed=_SEED,
        )
        simulation = Simulation(setup, heapq.merge(*(each.arrivals(length_s) for each in sources)))
        simulation.run(length_s, _DRAIN_S)
        return Served(simulation.journeys)


class Served(NamedTuple):
    """What became of all that came."""

    journeys: list[Journey]

    def share(self, tenant: str, from_s: float, until_s: float) -> float:
        """Of the engines' seconds of all whose first token came meanwhile."""
        seconds = {True: 0.0, False: 0.0}
        for each in self.journeys:
            ttft_s = each.outcome.ttft_s
            if ttft_s is not None and from_s <= each.request.due_s + ttft_s < until_s:
                seconds[each.request.tenant == tenant] += each.charged_s
        return seconds[True] / sum(seconds.values())

    def p95_s(self, tenant: str) -> float:
        """Of its time to first token; who was not answered never had any."""
        ttft = [e.outcome.ttft_s for e in self.journeys if e.request.tenant == tenant]
        return sorted(math.inf if each is None else each for each in ttft)[int(0.95 * len(ttft))]

    def num_tokens(self) -> int:
        """Of all that were answered, prompts and answers."""
        return sum(
            each.num_prompt_tokens + each.request.num_output_tokens
            for each in self.journeys
            if each.outcome.ttft_s is not None
        )


_FLOOD: Final = Source("flood", 10.0)
_LIGHT: Final = Source("light", 0.3)
_SMALL, _LARGE = Source("small", 12.0, 128), Source("large", 6.0, 512)


def backlogged(bench: Bench) -> str:
    share = bench.run([_SMALL, _LARGE], 90.0).share("small", 30.0, 90.0)
    return f"of two that always wait one has {share:.3f} in 60 s (0.475 to 0.525)"


def idle(bench: Bench) -> str:
    back = _SMALL._replace(pause_s=(20.0, 60.0))
    share = bench.run([back, _LARGE], 90.0).share("small", 70.0, 80.0)
    return f"back after 40 s, in 10 s one has {share:.3f} (0.55 at the most)"


def light(bench: Bench) -> str:
    alone_s = bench.run([_LIGHT], 300.0).p95_s("light")
    beside_s = bench.run([_FLOOD, _LIGHT], 300.0).p95_s("light")
    most_s = 1.3 * alone_s + CHUNK_S
    return f"P95 TTFT alone {alone_s:.2f} s, beside a flood {beside_s:.2f} s ({most_s:.2f})"


def throughput(bench: Bench) -> str:
    apart = bench.run([_SMALL, _LARGE], 90.0).num_tokens()
    one = [Source("small", *_SMALL[1:]), Source("small", *_LARGE[1:])]
    together = bench.run(one, 90.0).num_tokens()
    return f"tokens of what is answered, of those as one tenant: {apart / together:.3f} (0.98)"


def batch(bench: Bench) -> str:
    urgent = [Source(f"r{n}", 1.0, request_class=REALTIME) for n in range(10)]
    lines = Source("batch", 2.0, request_class=BATCH)
    share = bench.run([*urgent, lines], 180.0).share("batch", 60.0, 180.0)
    return f"batch below realtime has {share:.3f} ({0.9 / 9:.3f})"


CASES: Final[dict[str, Callable[[Bench], str]]] = {
    each.__name__: each for each in (backlogged, idle, light, throughput, batch)
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=[*CASES], help=", ".join(CASES))
    parser.add_argument("--placement", choices=["least-loaded", "predicted"])
    parser.add_argument("--runway", type=float)
    options = vars(parser.parse_args())
    names = options.pop("names")
    bench = Bench(**{name: value for name, value in options.items() if value is not None})
    for name in names:
        print(f"{name}: {CASES[name](bench)}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()

"""What products of many rows lose while another core multiplies few: a limit of the machine.

    python -m tests.bench.neighbour [--rounds 5] [--seconds 3]

One core multiplies 256 rows with the weights of a model of SmolLM2's shape, as prefill does, by
itself and beside a core that multiplies 16, as decode does; in turn. Nothing of Diptych runs.
"""

import argparse
import json
import multiprocessing
import os
import time
from statistics import median

import torch

from tests.bench.environment import environment

_HIDDEN, _INTERMEDIATE, _NUM_WEIGHTS = 576, 1536, 90
_MANY, _FEW = 256, 16


def multiply(core: int, num_rows: int, seconds: float) -> float:
    """Median time of a product with each weight, on one core."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    rows = torch.randn(num_rows, _HIDDEN)
    weights = [torch.randn(_HIDDEN, _INTERMEDIATE) for _ in range(_NUM_WEIGHTS)]
    times_s: list[float] = []
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        began_s = time.perf_counter()
        for weight in weights:
            rows @ weight
        times_s.append(time.perf_counter() - began_s)
    return median(times_s)


def main(args: argparse.Namespace) -> None:
    """Measure, print."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    context = multiprocessing.get_context("spawn")
    alone_s: list[float] = []
    beside_s: list[float] = []
    with context.Pool(2) as pool:
        for _ in range(args.rounds):
            alone_s.append(pool.apply(multiply, (cores[0], _MANY, args.seconds)))
            other = pool.apply_async(multiply, (cores[1], _FEW, args.seconds + 1))
            time.sleep(0.5)
            beside_s.append(pool.apply(multiply, (cores[0], _MANY, args.seconds)))
            other.get()
    ratios = [beside / alone for alone, beside in zip(alone_s, beside_s, strict=True)]
    result = {"alone_s": alone_s, "beside_s": beside_s, "ratio": median(ratios), "ratios": ratios}
    print(json.dumps({**result, **environment()}, indent=1))  # noqa: T201


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    main(parser.parse_args())

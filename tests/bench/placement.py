"""What one placement costs the router, by the number of workers.

    .venv/bin/python -m tests.bench.placement

Half of the workers prefill, or all have both roles; all are loaded unlike each other, and a tenth
of them remembers the prompt's first half. Each has told how it is since the placement before, of
as many answers as it may, all of this router and each of two lengths. CPU time of this process,
so that neighbours count less; the first placements, which fill tables, are left out.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple, TypeVar

from diptych.block_needs import ShippedBytes
from diptych.paced import MOST_TOLD, Paced
from diptych.step_model import NUM_KNOWN_STEPS, StepCost, StepModel, StepWork
from router.placement.cache_index import CacheIndex
from router.placement.least_loaded import LeastLoaded
from router.placement.policy import Policy
from router.placement.predicted import Predicted
from router.placement.query import Objectives, Query
from router.placement.views import DecodeView, EngineView, PrefillView, Snapshot, WorkerId
from tests.told_caches import holds

MODEL = StepModel(
    StepCost(0.04, 0.002, 1e-5, 0.0, 0.0, 1.2, NUM_KNOWN_STEPS),
    StepCost(0.1, 0.002, 1e-5, 1e-3, 1e-7, 1.2, NUM_KNOWN_STEPS),
)
NUM_TOKENS = 512
KEYS = tuple(number.to_bytes(16) for number in range(NUM_TOKENS // 16))
QUERY = Query(
    num_tokens=NUM_TOKENS,
    num_max_tokens=NUM_TOKENS + 100,
    block_keys=KEYS,
    objectives=Objectives(2.0, 0.1),
)
WARM_UP = 20
V = TypeVar("V", PrefillView, DecodeView)


class Cost(NamedTuple):
    """CPU time of a placement, ms."""

    policy: str
    num_workers: int
    median_ms: float
    p90_ms: float


def snapshot(num_workers: int, rng: random.Random, *, of_both: bool = False) -> Snapshot:
    """Workers that are all loaded, unlike each other."""
    sources = [WorkerId(f"p{i}:1", f"p{i}") for i in range(num_workers // (2 - of_both))]
    decoding = sources
    if not of_both:
        decoding = [WorkerId(f"d{i}:1", f"d{i}") for i in range(num_workers - len(sources))]
    proven = frozenset(source.incarnation for source in sources)
    return Snapshot(
        tuple(_prefill(source, rng.randrange(4000)) for source in sources),
        tuple(
            DecodeView(
                worker=worker,
                num_sequences=(num := rng.randrange(12, 14)),
                max_model_len=4096,
                local_prefill=True,
                proven=proven - {worker.incarnation} if of_both else proven,
                max_num_seqs=64,
                shipped=ShippedBytes.even(46080.0),
                bytes_per_s={each: rng.uniform(0.5e9, 2e9) for each in sorted(proven)},
                engine=EngineView(
                    model=MODEL,
                    max_batched_tokens=512,
                    work=StepWork(num, 400 * num),
                    paced=tuple(
                        Paced(0.1, 0.08 * (50 + i), 50, num_more, share=0.5)
                        for i in range(MOST_TOLD)
                        for num_more in (20, 80)
                    ),
                ),
            )
            for worker in decoding
        ),
    )


def told_anew(seen: Snapshot) -> Snapshot:
    """The same, as it is where each worker has just told."""

    def anew(view: V) -> V:
        return view if view.engine is None else replace(view, engine=replace(view.engine))

    prefill, decode = tuple(map(anew, seen.prefill)), tuple(map(anew, seen.decode))
    return replace(seen, prefill=prefill, decode=decode)


def _prefill(worker: WorkerId, num_waiting: int) -> PrefillView:
    work = StepWork.of_prompt(num_waiting, 0)
    engine = EngineView(model=MODEL, max_batched_tokens=512, work=work)
    return PrefillView(
        worker=worker, num_pending_tokens=num_waiting, max_model_len=4096, engine=engine
    )


def policies(num_workers: int) -> Iterator[tuple[str, Policy, Snapshot]]:
    """Both, with some memory of the prompt, and what they see."""
    seen = snapshot(num_workers, random.Random(num_workers))
    plain = _remembering(seen)
    yield "least-loaded", plain, seen
    yield "predicted", Predicted(plain, random.random), seen
    seen = snapshot(num_workers, random.Random(num_workers), of_both=True)
    yield "predicted, of both roles", Predicted(_remembering(seen), random.random), seen


def _remembering(seen: Snapshot) -> LeastLoaded:
    plain = LeastLoaded(
        CacheIndex(100_000), local_below_tokens=64, allow_local=True, allow_recompute=True
    )
    holders = [view.worker for view in seen.prefill[::10]]
    for worker in [*holders, *(view.worker for view in seen.decode[::10])]:
        holds(plain, worker, KEYS[: len(KEYS) // 2])
    return plain


def measure(num_workers: int, num_placements: int) -> Iterator[Cost]:
    """Of each policy."""
    for name, policy, seen in policies(num_workers):
        took = []
        for _ in range(WARM_UP + num_placements):
            now = told_anew(seen)
            began_s = time.process_time()
            assert policy.place(QUERY, now) is not None
            took.append(1000 * (time.process_time() - began_s))
        ordered = sorted(took[WARM_UP:])
        yield Cost(name, num_workers, statistics.median(ordered), ordered[int(0.9 * len(ordered))])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 16, 64, 256, 1000])
    parser.add_argument("--placements", type=int, default=200)
    options = parser.parse_args()
    for num_workers in options.workers:
        for cost in measure(num_workers, options.placements):
            print(json.dumps(cost._asdict()))  # noqa: T201


if __name__ == "__main__":
    main()

"""How well an engine foretells the time of its next step, on a stream of random requests.

    .venv/bin/python -m tests.bench.step_model --model demo

One engine without gRPC, as a worker runs it, learns from its own steps. Prompts of random
lengths come at random times and are computed in chunks beside the sequences that decode, so that
steps are of every mixture. Each step is foretold by what was learned from those before it; the
first ones, from which it learns, are left out. The target is a median error of 5 % and 88 to
92 % of steps below the upper quantile.
"""

import argparse
import asyncio
import json
import random
import statistics
from collections.abc import Sequence as Many
from pathlib import Path
from typing import NamedTuple

from decode_worker.config import DecodeWorkerConfig
from diptych.engine.protocol import Engine, StepRecord
from diptych.engine.scheduling.sequence import Sequence, SequenceKey, SequenceState
from diptych.engine.scheduling.step import SequenceUpdate
from diptych.sampling_params import SamplingParams
from diptych.step_model import StepModel
from diptych.worker.engine_parts import EngineParts
from tests.bench.engine_rig import Rig, loaded, model_thread
from tests.bench.environment import environment


class Foretold(NamedTuple):
    """Of one kind of step, those that were foretold."""

    num_steps: int
    median_s: float
    median_error: float  # of what a step took
    p90_error: float
    num_covered_ratio: float  # steps that took at most the upper quantile


def foretold(records: Many[StepRecord]) -> Foretold:
    """Compare what steps took with what was expected of them."""
    took = [record.duration_s + record.overhead_s for record in records]
    errors = sorted(
        abs(record.expected_s - took_s) / took_s
        for record, took_s in zip(records, took, strict=True)
    )
    num_covered = sum(
        took_s <= record.upper_s for record, took_s in zip(records, took, strict=True)
    )
    return Foretold(
        len(records),
        statistics.median(took),
        statistics.median(errors),
        errors[int(0.9 * len(errors))],
        num_covered / len(records),
    )


class Load:
    """Keeps an engine busy: a new request each few steps, of a random prompt and output."""

    def __init__(self, engine: Engine, options: argparse.Namespace) -> None:
        self.records: list[StepRecord] = []
        self.done = asyncio.Event()
        self._engine = engine
        self._options = options
        self._random = random.Random(options.seed)
        self._live: list[Sequence] = []
        self._num_started = 0
        self._num_quiet = 0  # steps until the next request
        engine.subscribe(self._on_step)

    def start(self) -> None:
        """One request more."""
        prompt = self._random.randrange(8, self._options.max_prompt)
        self._num_started += 1
        seq = Sequence(
            key=SequenceKey("bench", self._num_started),
            token_ids=[self._random.randrange(100, 40_000) for _ in range(prompt)],
            num_prompt_tokens=prompt,
            sampling=SamplingParams(
                temperature=0.0, max_tokens=self._random.randrange(4, self._options.max_output)
            ),
        )
        self._engine.reserve(seq)
        self._engine.start(seq, [], compute_missing=True)
        self._live.append(seq)

    def _on_step(self, updates: list[SequenceUpdate]) -> None:
        if self._engine.last_step is not None:
            self.records.append(self._engine.last_step)
        if len(self.records) >= self._options.steps:
            self.done.set()
            return
        self._live = [seq for seq in self._live if seq.state is not SequenceState.FINISHED]
        self._num_quiet -= 1
        if not self._live or (self._num_quiet <= 0 and len(self._live) < self._options.max_seqs):
            self._num_quiet = self._random.randrange(1, 2 * self._options.gap)
            self.start()

    def end(self) -> None:
        """Release what still runs."""
        for seq in self._live:
            self._engine.release(seq)


async def run(rig: Rig, parts: EngineParts, options: argparse.Namespace) -> list[StepRecord]:
    """The records of so many steps, in order."""
    load = Load(parts.engine, options)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(parts.engine.run(), name="engine")
        load.start()
        await load.done.wait()
        load.end()
        running.cancel()
    return load.records


def report(
    records: Many[StepRecord], model: StepModel, options: argparse.Namespace
) -> dict[str, object]:
    """All steps after the first, and each kind by itself."""
    counted = [record for record in records[options.skip :] if record.expected_s > 0]
    kinds = {
        "all": counted,
        "decode": [record for record in counted if not record.num_prefill_tokens],
        "prefill": [record for record in counted if record.num_prefill_tokens],
    }
    return {
        "environment": environment(),
        "model": options.model,
        "foretold": {name: foretold(kind)._asdict() for name, kind in kinds.items() if kind},
        "step_model": {name: cost._asdict() for name, cost in model._asdict().items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--skip", type=int, default=100, help="first steps, to learn from")
    parser.add_argument("--max-prompt", type=int, default=1024, help="tokens")
    parser.add_argument("--max-output", type=int, default=96, help="tokens")
    parser.add_argument("--max-seqs", type=int, default=16, help="requests at a time")
    parser.add_argument("--gap", type=int, default=6, help="steps between two requests, mean")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("bench-step-model.json"))
    options = parser.parse_args()
    config = DecodeWorkerConfig(
        model=options.model,
        num_threads=options.threads,
        max_num_seqs=options.max_seqs + 1,
        max_model_len=options.max_prompt + options.max_output + 1,
    )
    with model_thread() as thread, loaded(config, thread) as rig:
        parts = EngineParts.build(rig.config, rig.model, thread)
        records = asyncio.run(run(rig, parts, options))
        result = report(records, parts.engine.step_model, options)
    text = json.dumps(result, indent=1)
    options.out.write_text(text + "\n")
    print(text)  # noqa: T201


if __name__ == "__main__":
    main()

"""Forms of weights beside each other: whole steps of each, in turn; nothing else should run.

    .venv/bin/python -m tests.bench.weight_formats --model demo --model gemma

Decode steps at context 512 and prompts, from inputs to tokens, medians and minima over
rounds of each, and the median of float32 weights to it.
"""

import argparse
import statistics
from contextlib import ExitStack
from typing import NamedTuple

from diptych.engine.scheduling.step import StepPlan
from diptych.worker.cores import num_usable_cores
from tests.bench.engine_rig import Rig, loaded, model_thread
from tests.bench.limits import Workload, worker_config

FORMATS = {
    "float32": ("--dtype", "float32"),
    "compact": ("--dtype", "auto"),  # float32 too, where the checkpoint has them
    "int8": ("--quantization", "int8"),
}
WORKLOAD = Workload(batches=(1, 8, 16), contexts=(512,), prompts=(512, 2048), num_rounds=5)


class Task(NamedTuple):
    name: str
    plans: list[StepPlan]
    num_runs: int  # of a round, after one that does not count


def tasks(rig: Rig) -> list[Task]:
    """What is timed; plans hold for any format."""
    decode = [
        Task(f"decode, {batch} at {context}", [rig.decode_plan(batch, context)], 5)
        for context in WORKLOAD.contexts
        for batch in WORKLOAD.batches
    ]
    prefill = [Task(f"prefill of {n}", rig.prefill_plans(n), 1) for n in WORKLOAD.prompts]
    return decode + prefill


def measure(name: str, threads: list[int], formats: list[str]) -> None:
    """Print the times of one model."""
    with ExitStack() as stack:
        thread = stack.enter_context(model_thread())
        pool = WORKLOAD._replace(contexts=(512, max(WORKLOAD.prompts)), batches=(32,))
        rigs = [
            stack.enter_context(loaded(worker_config(name, pool, FORMATS[format_]), thread))
            for format_ in formats
        ]
        for num_threads in threads:
            for rig in rigs:
                rig.set_num_threads(num_threads)
            for task in tasks(rigs[0]):
                seconds: list[list[float]] = [[] for _ in rigs]
                for _ in range(WORKLOAD.num_rounds):
                    for rig, times in zip(rigs, seconds, strict=True):
                        if task.num_runs > 1:
                            rig.run(task.plans)  # after another format's weights
                        times += [rig.run(task.plans) for _ in range(task.num_runs)]
                medians = [1e3 * statistics.median(times) for times in seconds]
                figures = ", ".join(
                    f"{format_} {median:.1f} ms (least {1e3 * min(times):.1f}), "
                    f"{medians[0] / median:.2f} times as fast"
                    for format_, median, times in zip(formats, medians, seconds, strict=True)
                )
                print(f"{name}, threads {num_threads}, {task.name}: {figures}", flush=True)  # noqa: T201


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", action="append", help="demo, gemma or a folder; default: demo")
    parser.add_argument("--threads", default=f"1,{num_usable_cores()}", help="such as 1,2")
    parser.add_argument(
        "--format", action="append", choices=FORMATS, help="the first is compared with; all"
    )
    options = parser.parse_args()
    threads = [int(number) for number in options.threads.split(",")]
    for name in options.model or ["demo"]:
        measure(name, threads, options.format or list(FORMATS))


if __name__ == "__main__":
    main()

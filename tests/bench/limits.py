"""The engine against this machine's own limits; nothing else should run.

    .venv/bin/python -m tests.bench.limits --json bench-limits.json

The machine's ceilings (reading memory, multiplying matrices) are measured before
and after each model, and the largest counts: where they differ much, something else
ran. For each model and number of threads, in rounds: decode steps by batch and context,
and prompts. Medians.
Flags that are not listed here are the decode worker's, such as
``--quantization int8`` or ``--dtype bfloat16``. Prompts come in the chunks of a prefill
worker, or of ``--max-batched-tokens``.

Ratios, by model, larger is better unless it is a share:
``decode_b1_mbu`` bytes of weights and KV read / (step time x memory rate).
``decode_bB_roofline`` (``_cC`` at context C, else the first) sum over the operations of
max(bytes / memory rate, flops / arithmetic rate) / step time.
``prefill_N_mfu`` time of the arithmetic at its ceiling / time. The ceiling is that of
float32 products on vectors; where there is a matrix unit, ``prefill_N_mfu_parts`` has that of its
products of bfloat16 parts. ``--without-matrix-unit`` leaves it out, for us and for the ceilings.
``overhead_share_bB`` share of an engine's step outside the forward pass (scheduler,
messages, inputs, sampling). ``small_share_bB`` share of the forward pass in norms, rotary
embedding, activations and KV write.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from decode_worker.config import DecodeWorkerConfig
from diptych import settings
from diptych.engine.scheduling.step import StepPlan
from diptych.worker.cores import num_usable_cores
from tests.bench import ceilings, engine_rig, roofline
from tests.bench.ceilings import AS_PARTS, Machine
from tests.bench.engine_rig import Overhead, Rig, loaded, model_thread
from tests.bench.environment import environment, without_matrix_unit
from tests.bench.roofline import Ceilings, Operation
from tests.golden import models


class Workload(NamedTuple):
    """What is measured."""

    batches: tuple[int, ...] = (1, 8, 16, 32)
    contexts: tuple[int, ...] = (512, 2048)
    prompts: tuple[int, ...] = (512, 2048)
    num_rounds: int = 5
    steps_per_round: int = 5
    shares_batch: int = 16  # at the first context
    shares_steps: int = 20


QUICK = Workload(
    contexts=(64, 128), prompts=(64, 128), num_rounds=2, steps_per_round=2, shares_steps=5
)


class Task(NamedTuple):
    """Steps that are timed together, and the ratio that they give."""

    ratio: str
    plans: list[StepPlan]
    num_tokens: int  # sampled, or of the prompt
    least_s: Callable[[Iterable[Operation], Ceilings], float]


class Timing(NamedTuple):
    """A task's result."""

    task: Task
    ops: list[Operation]
    median_s: float

    def ratio(self, limit: Ceilings) -> float:
        return self.task.least_s(self.ops, limit) / self.median_s

    def row(self, limit: Ceilings) -> dict[str, object]:
        return {
            "ratio": self.task.ratio,
            "s": self.median_s,
            "tokens_per_s": self.task.num_tokens / self.median_s,
            "bytes": sum(op.num_bytes for op in self.ops),
            "flops": sum(op.flops for op in self.ops),
            "value": self.ratio(limit),
        }


class Shares(NamedTuple):
    """Where the time of a decode step goes, and that of the longest prompt."""

    engine: Overhead
    forward: dict[str, float]  # shares of the forward pass
    prefill: dict[str, float]  # likewise


def decode_task(rig: Rig, batch: int, context: int, workload: Workload) -> Task:
    suffix = "" if context == workload.contexts[0] else f"_c{context}"
    name, least_s = (
        (f"decode_b1{suffix}_mbu", roofline.least_memory_s)
        if batch == 1
        else (f"decode_b{batch}{suffix}_roofline", roofline.least_s)
    )
    return Task(name, [rig.decode_plan(batch, context)], batch, least_s)


def measure(rig: Rig, workload: Workload) -> list[Timing]:
    """Medians over rounds of all tasks."""
    tasks = [
        decode_task(rig, batch, context, workload)
        for context in workload.contexts
        for batch in workload.batches
    ]
    tasks += [
        Task(f"prefill_{num}_mfu", rig.prefill_plans(num), num, roofline.least_arithmetic_s)
        for num in workload.prompts
    ]
    seconds: list[list[float]] = [[] for _ in tasks]
    for number in range(workload.num_rounds):
        show(f"  round {number + 1} of {workload.num_rounds}")
        for task, times in zip(tasks, seconds, strict=True):
            if task.num_tokens > max(workload.batches):
                times.append(rig.run(task.plans))
                continue
            rig.run(task.plans)  # after another task's weights and blocks
            times += [rig.run(task.plans) for _ in range(workload.steps_per_round)]
    return [
        Timing(task, rig.operations(task.plans), statistics.median(times))
        for task, times in zip(tasks, seconds, strict=True)
    ]


def shares(rig: Rig, workload: Workload) -> Shares:
    """Passes of their own, because stopwatches cost time."""
    show("  shares of a step")
    batch, context = workload.shares_batch, workload.contexts[0]
    overhead = rig.overhead(batch, context, workload.shares_steps)
    decode = rig.parts([rig.decode_plan(batch, context)], workload.shares_steps)
    prefill = rig.parts(rig.prefill_plans(workload.prompts[-1]), num_runs=2)
    return Shares(overhead, decode.shares(), prefill.shares())


def run(
    names: Sequence[str], threads: Sequence[int], worker_args: Sequence[str], *, quick: bool = False
) -> dict[str, Any]:
    """Everything, as one JSON document."""
    with model_thread() as thread:
        return _run(thread, names, threads, worker_args, quick=quick)


def _run(
    thread: ThreadPoolExecutor,
    names: Sequence[str],
    threads: Sequence[int],
    worker_args: Sequence[str],
    *,
    quick: bool,
) -> dict[str, Any]:
    workload = QUICK if quick else Workload()
    configs = {name: worker_config(name, workload, worker_args) for name in names}
    weight_type = engine_rig.weight_type(next(iter(configs.values())))

    def machines() -> list[Machine]:
        show("ceilings of the machine")
        return [
            thread.submit(ceilings.measure, number, weight_type, quick=quick).result()
            for number in threads
        ]

    measured = [machines()]
    timings: list[tuple[str, Machine, list[Timing], Shares]] = []
    compact: list[str] = []
    for name, config in configs.items():
        with loaded(config, thread) as rig:
            compact += [name] if rig.is_compact else []
            for machine in measured[0]:
                show(f"{name}, threads: {machine.num_threads}")
                rig.set_num_threads(machine.num_threads)
                timings.append((name, machine, measure(rig, workload), shares(rig, workload)))
        measured.append(machines())
    best = [reduce(Machine.or_better, same) for same in zip(*measured, strict=True)]
    by_threads = {machine.num_threads: machine for machine in best}

    figures: list[dict[str, object]] = []
    ratios: dict[str, float] = {}
    for name, machine, of_tasks, of_step in timings:
        limit = by_threads[machine.num_threads].ceilings(weight_type)
        prefix = name if machine.num_threads == max(threads) else f"{name}_t{machine.num_threads}"
        rows = [timing.row(limit) for timing in of_tasks]
        figures.append(
            {
                "model": name,
                "weights": "compact" if name in compact else weight_type,
                "num_threads": machine.num_threads,
                "tasks": rows,
                "engine": of_step.engine._asdict(),
                "forward": of_step.forward,
                "prefill": of_step.prefill,
            }
        )
        ratios |= {f"{prefix}.{one.task.ratio}": one.ratio(limit) for one in of_tasks}
        if AS_PARTS in by_threads[machine.num_threads].flops_per_s and weight_type == "float32":
            split = by_threads[machine.num_threads].of_parts()
            for one, row in zip(of_tasks, rows, strict=True):
                if one.task.ratio.startswith("prefill_"):
                    row["of_parts"] = one.ratio(split)
                    ratios[f"{prefix}.{one.task.ratio}_parts"] = one.ratio(split)
        batch = workload.shares_batch
        ratios[f"{prefix}.overhead_share_b{batch}"] = of_step.engine.outside_forward
        ratios[f"{prefix}.small_share_b{batch}"] = of_step.forward["small"]
    return {
        "environment": environment(),
        "worker_args": list(worker_args),
        "weight_type": weight_type,
        "ceilings": [machine._asdict() for machine in best],
        "ceilings_measured": [machine._asdict() for each in measured for machine in each],
        "figures": figures,
        "ratios": ratios,
    }


def worker_config(name: str, workload: Workload, args: Sequence[str]) -> DecodeWorkerConfig:
    """The decode worker's settings with a pool for the largest batch."""
    folder = models.golden_folder("gemma3") if name == "gemma" else name
    block_size = 16
    num_blocks = max(workload.batches) * (max(workload.contexts) // block_size + 4)
    own = ["--model", str(folder), "--num-blocks", str(num_blocks)]
    own += ["--max-model-len", str(max(workload.contexts) + 64)]
    return settings.load(DecodeWorkerConfig, [*own, *args], prog="limits", env_prefix="LIMITS_")


def table(result: dict[str, Any]) -> str:
    lines = ["ceilings: before, after each model, and the largest, which counts"]
    for machine in [*result["ceilings_measured"], *result["ceilings"]]:
        rates = ", ".join(f"{n} {r / 1e9:.0f} GFLOP/s" for n, r in machine["flops_per_s"].items())
        lines.append(
            f"{machine['num_threads']} threads: "
            f"memory {machine['read_bytes_per_s'] / 1e9:.1f} GB/s, {rates}"
        )
    for figure in result["figures"]:
        lines += ["", f"{figure['model']}, {figure['weights']}, {figure['num_threads']} threads"]
        for row in figure["tasks"]:
            parts = f"   (of parts {row['of_parts']:.2f})" if "of_parts" in row else ""
            lines.append(
                f"  {row['ratio']:<26}{row['value']:6.2f}{1e3 * row['s']:10.1f} ms"
                f"{row['tokens_per_s']:10.1f} tokens/s{parts}"
            )
        engine = figure["engine"]
        lines.append(
            f"  engine's step {1e3 * engine['step_s']:.1f} ms, outside the forward pass "
            f"{100 * engine['outside_forward']:.1f} % "
            f"(inputs and sampling {100 * engine['inputs_and_sampling']:.1f} %)"
        )
        for name, part in (("forward pass", "forward"), ("prefill", "prefill")):
            shares = ", ".join(
                f"{what} {100 * share:.1f} %" for what, share in figure[part].items()
            )
            lines.append(f"  {name}: {shares}")
    return "\n".join(lines)


def report(result: dict[str, Any], to: str) -> None:
    """The JSON into a file and the table to standard output; or, for ``-``, the JSON there."""
    text = json.dumps(result, indent=1)
    if to == "-":
        show(table(result))
        print(text)  # noqa: T201
    else:
        Path(to).write_text(text + "\n")
        print(table(result))  # noqa: T201


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", action="append", help="demo, gemma or a folder; default: both")
    parser.add_argument("--threads", default=str(num_usable_cores()), help="such as 1,2")
    parser.add_argument("--quick", action="store_true", help="small and rough, for tests")
    parser.add_argument(
        "--without-matrix-unit", action="store_true", help="as on a processor that has none"
    )
    parser.add_argument(
        "--json", default="bench-limits.json", help="file; -: standard output, the table elsewhere"
    )
    options, worker_args = parser.parse_known_args()
    environ = {**os.environ, **without_matrix_unit()}
    if options.without_matrix_unit and environ != dict(os.environ):
        os.execve(
            sys.executable, [sys.executable, "-m", "tests.bench.limits", *sys.argv[1:]], environ
        )
    threads = [int(number) for number in options.threads.split(",")]
    result = run(options.model or ["demo", "gemma"], threads, worker_args, quick=options.quick)
    report(result, options.json)


if __name__ == "__main__":
    main()

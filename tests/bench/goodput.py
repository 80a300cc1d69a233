"""Goodput of one prefill + one decode worker against two colocated engines, as a map.

    .venv/bin/python -m tests.bench.goodput --trace AzureLLMInferenceTrace_conv.csv --cells 4

Each engine has one core to itself; router and load generator share the two (their
share of CPU is reported). All deployments stand behind the same router. Requests
arrive at random times (Poisson, the same for all) with lengths from the trace,
divided by ``--divide``; each prompt is fresh. A request's time runs from when it was due,
however late the load generator came to send it. Colocated engines are run once per
``--budget`` (tokens of a step: chunked prefill), the prefill worker's once per
``--prefill-budget``; for each cell of the map the best of each counts. Objectives are
multiples of the unloaded medians, which are measured first, one request at a time, on the
colocated engines with the largest budget.

Before anything is measured in a deployment, requests are sent to it until its workers know what
their steps take, as any that have served for some minutes do.

With ``--placement predicted`` each deployment is run with admission too, and two workers of
both roles with it: requests then say what they want, so that each objective is a run of its own.
``--static-batch`` are two colocated engines to which requests go in static batches of so many:
what servers did before continuous batching.

``--by-turns`` holds all deployments in memory, those idle that are not asked, so that the same
requests come to each within minutes: for machines that are not the same for hours.

Each run is written when it is done, and what ``--out`` has already is not run again: hours of
them can be made in pieces (``--cells``), with one setting or another each time.
"""

import argparse
import asyncio
import itertools
import random
import secrets
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import psutil

from diptych.rpc.channel import open_channel
from diptych.simulation.outcome import Objective, Outcome, medians
from diptych.simulation.trace_file import read_trace
from diptych.step_model import StepModel
from diptych.v1 import worker_pb2, worker_pb2_grpc
from router.cluster.watch import roles_of
from tests.bench.environment import environment
from tests.bench.goodput_runs import (
    ADMITTED,
    APART,
    BOTH,
    FORETOLD,
    FORETOLD_WHOLE,
    PREDICTED,
    STATIC,
    TOGETHER,
    TPOT_MULTIPLES,
    TTFT_MULTIPLES,
    UNLOADED,
    Multiples,
    cells,
    runs,
    table,
    told_right,
    unit_of,
)
from tests.bench.measured_cells import MeasuredCells
from tests.bench.slo import Lengths, scaled
from tests.bench.static_batches import StaticBatches
from tests.bench.workload import Workload
from tests.call import generate, token_request
from tests.cluster import Cluster, Process, running_cluster

DRAIN_S = 10.0  # after the last arrival; what is not done by then is a miss
NUM_UNLOADED = 12
UNLOADED_S = 120.0  # for one of these
NUM_AT_ONCE, NUM_TO_WARM_UP, WARM_UP_TOKENS = 4, 400, 16  # requests, at most; of each answer
FINISHED = "FINISHED"  # how a request ended; else as its error is called


async def warm_up(cluster: Cluster, work: Workload) -> None:
    """Send requests until every worker knows its steps."""
    rng, arrivals = random.Random(5), work.arrivals(rate=1.0, duration_s=2.0 * NUM_TO_WARM_UP)
    async with open_channel(cluster.router.address) as channel:
        for begin in range(0, NUM_TO_WARM_UP, NUM_AT_ONCE):
            if all([is_warm(await _state(worker)) for worker in cluster.workers]):
                return
            async with asyncio.TaskGroup() as tasks:
                for _, lengths in arrivals[begin : begin + NUM_AT_ONCE]:
                    prompt = work.prompt(lengths.prompt, rng)
                    brief = lengths._replace(output=WARM_UP_TOKENS)
                    asked = one(channel, prompt, brief, time.monotonic(), UNLOADED_S)
                    tasks.create_task(asked)
    raise RuntimeError("the workers do not learn what their steps take")


def is_warm(state: worker_pb2.WorkerState) -> bool:
    """Whether a worker knows the steps of what it is asked for."""
    model, roles = StepModel.from_proto(state.step_model), roles_of(state)
    is_decoding = worker_pb2.WORKER_ROLE_DECODE in roles
    is_computing = state.local_prefill or worker_pb2.WORKER_ROLE_PREFILL in roles
    knows_decode = model.decode.is_known or not is_decoding
    return knows_decode and (model.prefill.is_known or not is_computing)


async def _state(worker: Process) -> worker_pb2.WorkerState:
    async with open_channel(worker.address) as channel:
        call = worker_pb2_grpc.WorkerStub(channel).Watch(worker_pb2.WatchRequest())
        return await anext(aiter(call))


async def unloaded(cluster: Cluster, work: Workload) -> Objective:
    """Median TTFT and TPOT of requests that have the machine to themselves."""
    rng, outcomes = random.Random(3), []
    async with open_channel(cluster.router.address) as channel:
        for _, lengths in work.arrivals(rate=1.0, duration_s=4.0 * NUM_UNLOADED)[:NUM_UNLOADED]:
            prompt = work.prompt(lengths.prompt, rng)
            told = await one(channel, prompt, lengths, time.monotonic(), UNLOADED_S)
            outcomes.append(told.outcome)
    return medians(outcomes[2:])  # the first ones warm up


class Told(NamedTuple):
    """What became of one request."""

    outcome: Outcome
    gaps_s: list[float]  # between tokens
    ended: str  # FINISHED, or what its error is called


async def one(
    channel: grpc.aio.Channel,
    prompt: list[int],
    lengths: Lengths,
    due_s: float,
    until_s: float,
    wanted: Objective | None = None,
    batches: StaticBatches | None = None,
) -> Told:
    """Ask now for what was due at ``due_s``; what has not come ``until_s`` after that is missed.

    ``wanted``: what the request says that it wants. ``batches``: it is sent with one of these.
    """
    salt = secrets.token_hex(8)  # the same prompts at every rate, but in no cache
    request = token_request(prompt, max_tokens=lengths.output, salt=salt)
    turn = (
        nullcontext()
        if batches is None
        else batches.place(until_s if wanted is None else wanted.ttft_s)
    )
    async with turn:
        if wanted is not None:
            late_s = max(0.0, time.monotonic() - due_s)
            request.ttft_ms = max(1.0, 1000 * (wanted.ttft_s - late_s))
            request.tpot_ms = 1000 * wanted.tpot_s
        left_s = max(0.0, due_s + until_s - time.monotonic())
        answer = await generate(channel, request, timeout_s=left_s)
    gaps_s = [after - before for before, after in itertools.pairwise(answer.times)]
    ended = FINISHED if answer.error is None else answer.error.reason
    return Told(Outcome.of(due_s, answer.times, lengths.output), gaps_s, ended)


class Point(NamedTuple):
    """One load that is offered: a run."""

    rate: float  # requests per second
    seed: int
    multiples: Multiples | None = None  # that requests say they want; None: they say nothing

    @property
    def key(self) -> tuple[str, ...]:
        wanted = "any" if self.multiples is None else "{:g}x{:g}".format(*self.multiples)
        return (wanted, f"{self.rate:g}", str(self.seed))


async def offer(
    cluster: Cluster,
    work: Workload,
    point: Point,
    duration_s: float,
    wanted: Objective | None,
    batches: StaticBatches | None = None,
) -> tuple[list[Told], dict[str, float]]:
    """Offer the load; what became of each request in order of arrival, and the CPU share of each
    process, cores.
    """
    rng = random.Random(7)
    arrivals = work.arrivals(point.rate, duration_s, point.seed)
    plan = [(at, n, work.prompt(n.prompt, rng)) for at, n in arrivals]
    watched = {p.name: psutil.Process(p.pid) for p in cluster.processes}
    watched["load generator"] = psutil.Process()
    before = {name: cpu_s(process) for name, process in watched.items()}
    begin = time.monotonic()
    async with (
        open_channel(cluster.router.address) as channel,
        asyncio.TaskGroup() as tasks,
    ):
        running = []
        for at, lengths, prompt in plan:
            due_s = begin + at
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            until_s = duration_s + DRAIN_S - at
            asked = one(channel, prompt, lengths, due_s, until_s, wanted, batches)
            running.append(tasks.create_task(asked))
    elapsed = time.monotonic() - begin
    shares = {name: (cpu_s(p) - before[name]) / elapsed for name, p in watched.items()}
    return [task.result() for task in running], shares


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


class Deployment(NamedTuple):
    """One prefill and one decode worker, two colocated engines, or two workers of both roles."""

    kind: str
    budget: int  # tokens of a step of the engines that prefill; of static batches: requests of one
    placement: str = "least-loaded"

    @property
    def name(self) -> str:
        return f"{self.kind} {self.budget}"

    @property
    def key(self) -> tuple[str, ...]:
        return (self.kind, str(self.budget), self.placement)

    @contextmanager
    def running(self, options: argparse.Namespace) -> Iterator[Cluster]:
        flags = {
            "kv-cache-memory": "768MiB",
            "max-model-len": str(options.max_prompt + options.max_output + 16),
            "max-num-seqs": "32",
            "num-threads": "1",
        }
        budget = max(options.budget) if self.kind == STATIC else self.budget
        steps, placing = {"max-batched-tokens": str(budget)}, {"placement": self.placement}
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            if self.kind == APART:
                cluster = running_cluster(
                    Path(folder),
                    options.model,
                    worker_flags=flags,
                    prefill_flags={"cpus": "0", **steps},
                    decode_flags={"cpus": "1", "no-local-prefill": ""},
                    router_flags={"local-prefill-below-tokens": "0", **placing},
                )
            else:
                cluster = running_cluster(
                    Path(folder),
                    options.model,
                    num_prefill=0,
                    num_decode=2,
                    worker_flags={**flags, **steps},
                    per_decode_flags=[{"cpus": "0"}, {"cpus": "1"}],
                    router_flags=placing,
                    decode_module="soft_worker" if self.kind == BOTH else "decode_worker",
                )
            yield stack.enter_context(cluster)

    def points(self, options: argparse.Namespace) -> list[Point]:
        """What is offered to it."""
        wanted: Sequence[Multiples | None] = [None]
        if self.placement == PREDICTED:
            wanted = list(itertools.product(options.ttft_multiple, options.tpot_multiple))
        loads = itertools.product(wanted, options.rate, options.seed)
        return [Point(rate, seed, multiples) for multiples, rate, seed in loads]


async def measure(
    cluster: Cluster,
    work: Workload,
    point: Point,
    unit: Objective,
    duration_s: float,
    batches: StaticBatches | None = None,
) -> dict[str, Any]:
    """One run. Of the gaps between all tokens of all answers it keeps two percentiles, s."""
    wanted = None
    if point.multiples is not None:
        ttft, tpot = point.multiples
        wanted = Objective(ttft * unit.ttft_s, tpot * unit.tpot_s)
    before = {what: foretold(cluster, what) for what in (FORETOLD, FORETOLD_WHOLE)}
    told, shares = await offer(cluster, work, point, duration_s, wanted, batches)
    await cluster.wait_baseline(within_s=30.0)
    gaps_s = [gap_s for each in told for gap_s in each.gaps_s]
    percentiles = statistics.quantiles(gaps_s, n=100) if len(gaps_s) > 1 else [0.0] * 99
    run: dict[str, Any] = {
        "outcomes": [each.outcome for each in told],
        "ended": Counter(each.ended for each in told),
        "itl_s": {"p50": percentiles[49], "p99": percentiles[98]},
        "cpu": shares,
        "steps": [await learned_steps(worker) for worker in cluster.workers],
    }
    if point.multiples is not None:
        for what, earlier in before.items():
            now = foretold(cluster, what)
            run[what] = {le: num - earlier.get(le, 0.0) for le, num in now.items()}
    return run


async def learned_steps(worker: Process) -> dict[str, dict[str, Any]]:
    """What a worker says that its steps take, as :mod:`tests.bench.step_model` writes it."""
    model = StepModel.from_proto((await _state(worker)).step_model)
    return {kind: cost._asdict() for kind, cost in model._asdict().items()}


def foretold(cluster: Cluster, what: str) -> dict[str, float]:
    """First tokens so far, by what they took at the most of what was foretold."""
    samples, prefix = (
        cluster.router.metrics().items(),
        f'diptych_router_ttft_{what}_ratio_bucket{{le="',
    )
    return {key[len(prefix) : -2]: num for key, num in samples if key.startswith(prefix)}


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True, help="as of diptych simulate")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--vocab", type=int, default=49_000, help="token ids below this")
    parser.add_argument("--divide", type=float, default=4.0, help="all lengths by this")
    parser.add_argument("--max-prompt", type=int, default=1024, help="tokens, after dividing")
    parser.add_argument("--max-output", type=int, default=256, help="tokens, after dividing")
    parser.add_argument("--rate", type=float, nargs="+", default=[0.5, 1.0, 1.5, 2.0])
    parser.add_argument("--duration", type=float, default=45.0, help="s of arrivals per rate")
    parser.add_argument("--budget", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--prefill-budget", type=int, nargs="+", default=[128, 512, 1024])
    parser.add_argument(
        "--static-batch", type=int, nargs="*", default=[], help="requests of a static batch"
    )
    parser.add_argument(
        "--static-wait", type=float, default=0.5, help="s that its first request waits at the most"
    )
    parser.add_argument("--placement", nargs="+", default=["least-loaded"])
    parser.add_argument(
        "--deployment",
        nargs="+",
        choices=list(ADMITTED.values()),
        default=list(ADMITTED.values()),
        help="soft: workers of both roles, with --placement predicted",
    )
    parser.add_argument(
        "--arrivals",
        choices=("poisson", "trace"),
        default="poisson",
        help="trace: as parts of the trace came, as much faster as --rate says",
    )
    parser.add_argument("--seed", type=int, nargs="+", default=[11], help="of arrivals and lengths")
    parser.add_argument("--ttft-multiple", type=float, nargs="+", default=TTFT_MULTIPLES)
    parser.add_argument("--tpot-multiple", type=float, nargs="+", default=TPOT_MULTIPLES)
    parser.add_argument(
        "--by-turns",
        action="store_true",
        help="all deployments stand at once, and each load is offered to one after the other",
    )
    parser.add_argument("--cells", type=int, help="so many more runs at the most")
    parser.add_argument("--out", type=Path, default=Path("bench-goodput.json"))
    options = parser.parse_args()
    done = MeasuredCells(options.out, common(options))
    try:
        run_missing(options, done)
    finally:
        if UNLOADED in done:
            print(table(cells(runs(done), unit_of(done), options.duration)))  # noqa: T201
            for kind, told in ADMITTED.items():
                right, whole = (told_right(done, kind, what) for what in (FORETOLD, FORETOLD_WHOLE))
                line = (
                    f"{told}: first tokens as foretold, by 12 %: {right}; since they came {whole}"
                )
                print(line)  # noqa: T201


def common(options: argparse.Namespace) -> dict[str, Any]:
    """What all runs of one file share."""
    names = ("model", "divide", "max_prompt", "max_output", "duration", "arrivals")
    told = {name: getattr(options, name) for name in names}
    return {"trace": options.trace.name, "is_warm": True, **told}


def deployments(options: argparse.Namespace) -> Iterator[Deployment]:
    """Those that are asked for; the first measures the unloaded medians."""
    for placement in options.placement:
        for each in sorted(options.budget, reverse=True):
            yield Deployment(TOGETHER, each, placement)
            if placement == PREDICTED:
                yield Deployment(BOTH, each, placement)
        for each in options.prefill_budget:
            yield Deployment(APART, each, placement)
        for each in options.static_batch:
            yield Deployment(STATIC, each, placement)


def run_missing(options: argparse.Namespace, done: MeasuredCells) -> None:
    """Run what the file lacks, as much as is asked for."""
    shapes = read_trace(options.trace)
    lengths = scaled(shapes, options.divide, options.max_prompt, options.max_output)
    moments_s = [shape.at_s for shape in shapes] if options.arrivals == "trace" else []
    work, num_left = Workload(lengths, options.vocab, moments_s), options.cells
    wanted = [each for each in deployments(options) if ADMITTED[each.kind] in options.deployment]
    for together in [wanted] if options.by_turns else [[each] for each in wanted]:
        todo = turns(together, options, done)[:num_left]
        with ExitStack() as stack:
            standing = {
                each: stack.enter_context(started(each, options, work, done))
                for each in dict.fromkeys(each for each, _ in todo)
            }
            for each, point in todo:
                unit, batches = unit_of(done), None
                if each.kind == STATIC:
                    batches = StaticBatches(each.budget, options.static_wait)
                cluster, lasts_s = standing[each], options.duration
                run = asyncio.run(measure(cluster, work, point, unit, lasts_s, batches))
                done.add(each.key + point.key, run)
                show(f"{' '.join(each.key + point.key)}: {len(run['outcomes'])} offered")
        num_left = None if num_left is None else num_left - len(todo)


def turns(
    together: Sequence[Deployment], options: argparse.Namespace, done: MeasuredCells
) -> list[tuple[Deployment, Point]]:
    """What is missing, load after load; who was last with one is first with the next."""
    points = {each: each.points(options) for each in together}
    loads = dict.fromkeys(point for of_each in points.values() for point in of_each)
    orders = itertools.cycle([list(together), list(reversed(together))])
    every = [(each, load) for load in loads for each in next(orders) if load in points[each]]
    return [(each, load) for each, load in every if each.key + load.key not in done]


@contextmanager
def started(
    deployment: Deployment, options: argparse.Namespace, work: Workload, done: MeasuredCells
) -> Iterator[Cluster]:
    """It, warm; the first that ever is measures the unloaded medians."""
    show(f"starting {deployment.name}, {deployment.placement}")
    with deployment.running(options) as cluster:
        asyncio.run(cluster.wait_ready(2 if deployment.kind == BOTH else None))
        asyncio.run(warm_up(cluster, work))
        if UNLOADED not in done:
            unit = asyncio.run(unloaded(cluster, work))
            done.add(UNLOADED, {**unit._asdict(), "environment": environment()})
            show(f"unloaded medians: {unit}")
        yield cluster


if __name__ == "__main__":
    main()

"""Goodput of one prefill + one decode worker against two colocated engines, as a map.

    .venv/bin/python -m tests.bench.goodput --trace AzureLLMInferenceTrace_conv.csv

Each engine has one core to itself; router and load generator share the two (their
share of CPU is reported). Both deployments stand behind the same router. Requests
arrive at random times (Poisson, the same for all) with lengths from the trace,
divided by ``--divide``; each prompt is fresh. A request's time runs from when it was due,
however late the load generator came to send it. Colocated engines are run once per
``--budget`` (tokens of a step: chunked prefill), the prefill worker's once per
``--prefill-budget``; for each cell of the map the best of each counts. Objectives are
multiples of the unloaded medians, which are measured first, one request at a time, on the
colocated engines with the largest budget.
"""

import argparse
import asyncio
import json
import random
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import psutil

from diptych.rpc.channel import open_channel
from diptych.simulation.outcome import Objective, Outcome, goodput, medians
from tests.bench.environment import environment
from tests.bench.slo import Lengths, best, read_azure
from tests.call import generate, token_request
from tests.cluster import Cluster, running_cluster

TTFT_MULTIPLES, TPOT_MULTIPLES = (3.0, 5.0, 10.0), (1.5, 2.0, 3.0)
DRAIN_S = 10.0  # after the last arrival; what is not done by then is a miss
NUM_UNLOADED = 12
UNLOADED_S = 120.0  # for one of these
APART, TOGETHER = "prefill budget", "budget"  # how deployments are named, and their best budget


class Workload:
    """The same arrivals, lengths and prompts for every deployment."""

    def __init__(self, lengths: Sequence[Lengths], vocab: int, seed: int = 11) -> None:
        self._lengths, self._vocab, self._seed = lengths, vocab, seed

    def arrivals(self, rate: float, duration_s: float) -> list[tuple[float, Lengths]]:
        """(seconds after the start, lengths) of each request, Poisson at ``rate`` per second."""
        rng, now, result = random.Random(self._seed), 0.0, []
        while (now := now + rng.expovariate(rate)) < duration_s:
            result.append((now, rng.choice(self._lengths)))
        return result

    def prompt(self, num_tokens: int, rng: random.Random) -> list[int]:
        return [rng.randrange(100, self._vocab) for _ in range(num_tokens)]


async def unloaded(cluster: Cluster, work: Workload) -> Objective:
    """Median TTFT and TPOT of requests that have the machine to themselves."""
    rng, outcomes = random.Random(3), []
    async with open_channel(cluster.router.address) as channel:
        for _, lengths in work.arrivals(rate=1.0, duration_s=4.0 * NUM_UNLOADED)[:NUM_UNLOADED]:
            prompt = work.prompt(lengths.prompt, rng)
            outcomes.append(await one(channel, prompt, lengths, time.monotonic(), UNLOADED_S))
    return medians(outcomes[2:])  # the first ones warm up


async def one(
    channel: grpc.aio.Channel, prompt: list[int], lengths: Lengths, due_s: float, until_s: float
) -> Outcome:
    """Ask now for what was due at ``due_s``; what has not come ``until_s`` after that is missed."""
    salt = secrets.token_hex(8)  # the same prompts at every rate, but in no cache
    request = token_request(prompt, max_tokens=lengths.output, salt=salt)
    left_s = max(0.0, due_s + until_s - time.monotonic())
    answer = await generate(channel, request, timeout_s=left_s)
    return Outcome.of(due_s, answer.times, lengths.output)


async def offer(
    cluster: Cluster, work: Workload, rate: float, duration_s: float
) -> tuple[list[Outcome], dict[str, float]]:
    """Offer the load; outcomes in order of arrival, and the CPU share of each process, cores."""
    rng = random.Random(7)
    plan = [(at, n, work.prompt(n.prompt, rng)) for at, n in work.arrivals(rate, duration_s)]
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
            running.append(tasks.create_task(one(channel, prompt, lengths, due_s, until_s)))
    elapsed = time.monotonic() - begin
    shares = {name: (cpu_s(p) - before[name]) / elapsed for name, p in watched.items()}
    return [task.result() for task in running], shares


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


class Deployment(NamedTuple):
    """One prefill and one decode worker (``APART``), or two colocated engines (``TOGETHER``)."""

    kind: str
    budget: int  # tokens of a step of the engines that prefill

    @property
    def name(self) -> str:
        return f"{self.kind} {self.budget}"

    @contextmanager
    def running(self, options: argparse.Namespace) -> Iterator[Cluster]:
        flags = {
            "kv-cache-memory": "768MiB",
            "max-model-len": str(options.max_prompt + options.max_output + 16),
            "max-num-seqs": "32",
            "num-threads": "1",
        }
        steps = {"max-batched-tokens": str(self.budget)}
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            if self.kind == APART:
                cluster = running_cluster(
                    Path(folder),
                    options.model,
                    worker_flags=flags,
                    prefill_flags={"cpus": "0", **steps},
                    decode_flags={"cpus": "1"},
                    router_flags={"local-prefill-below-tokens": "0"},
                )
            else:
                cluster = running_cluster(
                    Path(folder),
                    options.model,
                    num_prefill=0,
                    num_decode=2,
                    worker_flags={**flags, **steps},
                    per_decode_flags=[{"cpus": "0"}, {"cpus": "1"}],
                )
            yield stack.enter_context(cluster)


async def measure(
    cluster: Cluster, name: str, work: Workload, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One row per rate."""
    rows = []
    for rate in options.rate:
        outcomes, shares = await offer(cluster, work, rate, options.duration)
        rows.append({"deployment": name, "rate": rate, "outcomes": outcomes, "cpu": shares})
        middle = medians(outcomes) if any(o.ttft_s for o in outcomes) else None
        show(f"{name}, {rate} requests/s: {len(outcomes)} offered, medians {middle}")
        await cluster.wait_baseline(within_s=30.0)
    return rows


def cells(
    rows: Sequence[dict[str, Any]], unit: Objective, duration_s: float
) -> list[dict[str, Any]]:
    """The map: for each objective each deployment's peak over the rates, and their ratio."""
    result = []
    for ttft in TTFT_MULTIPLES:
        for tpot in TPOT_MULTIPLES:
            objective = Objective(ttft * unit.ttft_s, tpot * unit.tpot_s)
            peaks: dict[str, float] = {}
            for row in rows:
                value = goodput(row["outcomes"], objective, duration_s)
                peaks[row["deployment"]] = max(value, peaks.get(row["deployment"], 0.0))
            setting, apart = best(_of(APART, peaks))
            name, together = best(_of(TOGETHER, peaks))
            result.append(
                {
                    "ttft_multiple": ttft,
                    "tpot_multiple": tpot,
                    "disaggregated": apart,
                    "disaggregated_setting": setting,
                    "colocated": together,
                    "colocated_setting": name,
                    "ratio": apart / together if together else None,
                }
            )
    return result


def _of(kind: str, peaks: dict[str, float]) -> dict[str, float]:
    return {name: peak for name, peak in peaks.items() if name.startswith(f"{kind} ")}


def table(result: Sequence[dict[str, Any]]) -> str:
    lines = ["TTFT  TPOT  disaggregated (best budget)  colocated (best budget)  ratio"]
    for cell in result:
        ratio = "-" if cell["ratio"] is None else f"{cell['ratio']:.2f}"
        lines.append(
            f"{cell['ttft_multiple']:>3g}x  {cell['tpot_multiple']:>3g}x"
            f"  {cell['disaggregated']:>13.2f} ({cell['disaggregated_setting']})"
            f"  {cell['colocated']:>9.2f}"
            f" ({cell['colocated_setting']})  {ratio}"
        )
    return "\n".join(lines)


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True, help="CSV of the Azure trace of 2023")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--vocab", type=int, default=49_000, help="token ids below this")
    parser.add_argument("--divide", type=float, default=4.0, help="all lengths by this")
    parser.add_argument("--max-prompt", type=int, default=1024, help="tokens, after dividing")
    parser.add_argument("--max-output", type=int, default=256, help="tokens, after dividing")
    parser.add_argument("--rate", type=float, nargs="+", default=[0.5, 1.0, 1.5, 2.0])
    parser.add_argument("--duration", type=float, default=45.0, help="s of arrivals per rate")
    parser.add_argument("--budget", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--prefill-budget", type=int, nargs="+", default=[128, 512, 1024])
    parser.add_argument("--out", type=Path, default=Path("bench-goodput.json"))
    options = parser.parse_args()
    lengths = read_azure(options.trace, options.divide, options.max_prompt, options.max_output)
    work = Workload(lengths, options.vocab)
    rows: list[dict[str, Any]] = []
    unit: Objective | None = None
    deployments = [Deployment(TOGETHER, each) for each in sorted(options.budget, reverse=True)]
    deployments += [Deployment(APART, each) for each in options.prefill_budget]
    for each in deployments:
        show(f"starting {each.name}")
        with each.running(options) as cluster:
            asyncio.run(cluster.wait_ready())
            if unit is None:
                unit = asyncio.run(unloaded(cluster, work))
                show(f"unloaded medians: {unit}")
            rows += asyncio.run(measure(cluster, each.name, work, options))
    assert unit is not None
    result = cells(rows, unit, options.duration)
    options.out.write_text(
        json.dumps(
            {
                "environment": environment(),
                "model": options.model,
                "divide": options.divide,
                "duration_s": options.duration,
                "unloaded": unit._asdict(),
                "map": result,
                "runs": rows,
            },
            indent=1,
        )
        + "\n"
    )
    print(table(result))  # noqa: T201


if __name__ == "__main__":
    main()

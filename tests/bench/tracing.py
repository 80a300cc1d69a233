"""What tracing every request costs, what a trace explains, and what a scrape takes.

    python -m tests.bench.tracing [--model demo] [--seconds 360] [--requests 16] [--at-once 4]
        [--json OUT] [--record FILE]

One prefill and one decode worker under two routers: one that traces every request, and one that
traces none and whose clients ask for no trace. Short rounds of the same requests alternate
between them, and each traced round is compared with the untraced one beside it: the throughput,
and the CPU time of router and workers. After each round its spans are waited for, within
its CPU time. The collector is this process, on the same cores; it keeps bytes, and decodes them
when all is measured. Of each traced request the spans that tile the time to first token are
summed and compared with what the client saw. Meanwhile every process is scraped, by a process of
its own. With ``--model tiny`` steps take next to nothing, and tracing is a large part of the rest.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from diptych.rpc.channel import open_channel
from diptych.telemetry.stages import TTFT_STAGES
from diptych.v1 import inference_pb2_grpc
from tests.bench.environment import environment
from tests.bench.machine_use import MachineUse
from tests.bench.scraper import scraping
from tests.bench.tracing_figures import (
    Answered,
    Pair,
    Round,
    ScrapeFigures,
    TracingFigures,
    scrape_figures,
    told,
    tracing_figures,
)
from tests.call import token_request
from tests.cluster import Cluster, another_router, running_cluster
from tests.tiny_model import write_tiny_model
from tests.trace_collector import CLIENT_SPAN, Collector, collecting
from tests.waiting import until

_NUM_PROMPT_TOKENS, _NUM_OUTPUT_TOKENS = 256, 16
_SETTLE_S: Final = 2.5  # until the spans of a round have been sent


class Load(NamedTuple):
    """What is asked in a round."""

    num_requests: int
    num_at_once: int


class Side(NamedTuple):
    """A router with its workers, and how it is asked."""

    cluster: Cluster
    stub: "inference_pb2_grpc.InferenceAsyncStub"
    is_traced: bool

    def cpu_s(self) -> list[float]:
        """What each process has used so far, in the order of ``tracing_figures.ROLES``."""
        times = [psutil.Process(each.pid).cpu_times() for each in self.cluster.processes]
        return [each.user + each.system for each in times]


async def one(side: Side, numbers: random.Random) -> Answered:
    """A request of its own prompt, in a trace of its own."""
    trace_id = f"{numbers.getrandbits(128):032x}"
    ids = [numbers.randrange(10, 500) for _ in range(_NUM_PROMPT_TOKENS)]
    request = token_request(ids, max_tokens=_NUM_OUTPUT_TOKENS)
    asked = (("traceparent", f"00-{trace_id}-{CLIENT_SPAN.hex()}-01"),)
    ttft_s, num_tokens, began_s = None, 0, time.monotonic()
    async for response in side.stub.Generate(request, metadata=asked if side.is_traced else ()):
        if ttft_s is None and response.HasField("delta"):
            ttft_s = time.monotonic() - began_s
        num_tokens += len(response.delta.token_ids)
    assert ttft_s is not None
    return Answered(trace_id, ttft_s, num_tokens)


async def one_round(side: Side, load: Load, numbers: random.Random) -> Round:
    """All requests, and what is sent of their spans afterwards."""
    left = iter(range(load.num_requests))

    async def client() -> list[Answered]:
        return [await one(side, numbers) for _ in left]

    before_s, began_s = side.cpu_s(), time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        clients = [tasks.create_task(client()) for _ in range(load.num_at_once)]
    took_s = time.monotonic() - began_s
    await asyncio.sleep(_SETTLE_S)
    used_s = [after - before for before, after in zip(before_s, side.cpu_s(), strict=True)]
    answers = [answer for each in clients for answer in each.result()]
    num_tokens = sum(answer.num_tokens for answer in answers)
    return Round(answers, num_tokens / took_s, tuple(each / len(answers) for each in used_s))


async def rounds(untraced: Side, traced: Side, load: Load, for_s: float) -> list[Pair]:
    """Pairs of rounds, of which now one comes first and now the other."""
    numbers = random.Random(1)  # no prompt comes twice: prefixes are cached
    pairs: list[Pair] = []
    ends_s = time.monotonic() + for_s
    while time.monotonic() < ends_s:
        if len(pairs) % 2:
            with_traces = await one_round(traced, load, numbers)
            pairs.append(Pair(await one_round(untraced, load, numbers), with_traces))
        else:
            without = await one_round(untraced, load, numbers)
            pairs.append(Pair(without, await one_round(traced, load, numbers)))
    return pairs


def explained_s(collector: Collector) -> dict[str, float]:
    """What the spans of each trace say of the time to first token."""
    stages = {stage.span_name for stage in TTFT_STAGES}
    sums: dict[str, float] = {}
    for _, span in collector.spans:
        if span.name in stages:
            length_s = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
            trace_id = span.trace_id.hex()
            sums[trace_id] = sums.get(trace_id, 0.0) + length_s
    return sums


async def measure(
    collector: Collector, traced: Cluster, untraced: Cluster, args: argparse.Namespace
) -> tuple[TracingFigures, dict[str, ScrapeFigures]]:
    """Warm up, then the rounds; what they say."""
    load = Load(args.requests, args.at_once)
    processes = {each.name: each.metrics_address for each in traced.processes}
    processes["untraced router"] = untraced.router.metrics_address
    async with (
        open_channel(untraced.router.address) as plain,
        open_channel(traced.router.address) as tracing,
    ):
        off = Side(untraced, inference_pb2_grpc.InferenceStub(plain), is_traced=False)
        on = Side(traced, inference_pb2_grpc.InferenceStub(tracing), is_traced=True)
        for side in (off, on):
            await one_round(side, load, random.Random(0))
        collector.exports.clear()
        with scraping(list(processes.values())) as scrapes:
            pairs = await rounds(off, on, load, args.seconds)
    answers = [answer for pair in pairs for answer in pair.traced.answers]
    await until(lambda: {each.trace_id for each in answers} <= explained_s(collector).keys(), 30)
    figures = tracing_figures(
        pairs, explained_s(collector), collector.exports, len(collector.spans)
    )
    return figures, scrape_figures(scrapes, list(processes))


async def main(args: argparse.Namespace) -> None:
    """Start, measure, write."""
    async with collecting() as (collector, endpoint):
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            model = str(write_tiny_model(folder / "tiny")) if args.model == "tiny" else args.model
            plain = {"local-prefill-below-tokens": "0"}
            # A worker begins no traces by itself: untraced, it is not told to trace.
            tracing = {"otlp-endpoint": endpoint, "trace-sample-ratio": "0"}
            traced = stack.enter_context(
                running_cluster(
                    folder,
                    model,
                    worker_flags=tracing,
                    router_flags={**plain, "otlp-endpoint": endpoint},
                )
            )
            untraced = stack.enter_context(another_router(traced, folder, Path(model), plain))
            for cluster in (traced, untraced):
                await cluster.wait_ready()
            use = MachineUse()
            tracing_cost, scrapes = await measure(collector, traced, untraced, args)
            others_cores = use.since().others_cores
        if args.record is not None:
            args.record.write_text("".join(f"{line}\n" for line in collector.json_lines()))
    print(told(tracing_cost, scrapes))  # noqa: T201
    print(f"others used {others_cores:.2f} cores")  # noqa: T201
    if args.json is not None:
        result = {
            **asdict(tracing_cost),
            "scrapes": {name: asdict(each) for name, each in scrapes.items()},
            "others_cores": others_cores,
            "arguments": {key: str(value) for key, value in vars(args).items()},
            **environment(),
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo", help="demo, tiny, or a folder")
    parser.add_argument("--seconds", type=float, default=360, help="the start not counted")
    parser.add_argument("--requests", type=int, default=16, help="of a round")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--record", type=Path, help="write the spans here, as OTLP in JSON")
    asyncio.run(main(parser.parse_args()))

"""What a trace explains of the time that a client waited, and what tracing and scraping cost.

    python -m tests.bench.tracing [--model demo] [--requests 50] [--at-once 4] [--rounds 5]
        [--json OUT] [--record FILE]

One prefill and one decode worker under two routers, one that traces every request and one that
traces none; rounds of the same requests alternate between them. The collector is this process,
on the same cores. Of each traced request the spans that tile the time to first token are summed
and compared with what the client saw. Meanwhile every process is scraped.
"""

import argparse
import asyncio
import json
import random
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from diptych.rpc.channel import open_channel
from diptych.telemetry.stages import TTFT_STAGES
from diptych.v1 import inference_pb2_grpc
from tests import metrics
from tests.bench.environment import environment
from tests.call import token_request
from tests.cluster import Cluster, another_router, running_cluster
from tests.trace_collector import CLIENT_SPAN, Collector, collecting
from tests.waiting import until

_NUM_PROMPT_TOKENS, _NUM_OUTPUT_TOKENS = 256, 16
_SCRAPE_EVERY_S = 0.2


class Answered(NamedTuple):
    """One request, as its client saw it."""

    trace_id: str
    ttft_s: float


class Round(NamedTuple):
    """All requests of one round."""

    answers: list[Answered]
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingFigures:
    """Ratios of times; scrapes in seconds."""

    num_requests: int  # traced ones, of all rounds
    unexplained_median: float  # |span sum - client's TTFT| / client's TTFT
    unexplained_worst: float
    explained_within_5_percent: float  # share of the requests
    tokens_per_s_untraced: list[float]  # by round
    tokens_per_s_traced: list[float]
    cost_median: float  # 1 - traced / untraced, of the medians
    scrape_median_s: float
    scrape_worst_s: float
    scrapes_within_50_ms: float  # share of all


async def one(address: str, numbers: random.Random) -> Answered:
    """A request of its own prompt, in a trace of its own."""
    trace_id = f"{numbers.getrandbits(128):032x}"
    ids = [numbers.randrange(10, 500) for _ in range(_NUM_PROMPT_TOKENS)]
    request = token_request(ids, max_tokens=_NUM_OUTPUT_TOKENS)
    metadata = (("traceparent", f"00-{trace_id}-{CLIENT_SPAN.hex()}-01"),)
    ttft_s = None
    async with open_channel(address) as channel:
        await channel.channel_ready()
        began_s = time.monotonic()
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request, metadata=metadata)
        async for response in call:
            if ttft_s is None and response.HasField("delta"):
                ttft_s = time.monotonic() - began_s
    assert ttft_s is not None
    return Answered(trace_id, ttft_s)


async def one_round(address: str, num_requests: int, num_at_once: int, seed: int) -> Round:
    """So many requests, so many at a time."""
    numbers = random.Random(seed)
    left = iter(range(num_requests))

    async def client() -> list[Answered]:
        return [await one(address, numbers) for _ in left]

    began_s = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        clients = [tasks.create_task(client()) for _ in range(num_at_once)]
    took_s = time.monotonic() - began_s
    answers = [answer for each in clients for answer in each.result()]
    return Round(answers, num_requests * _NUM_OUTPUT_TOKENS / took_s)


@contextmanager
def scraping(addresses: Sequence[str]) -> Iterator[list[float]]:
    """Scrape all of them again and again, on a thread; how long each scrape took."""
    took_s: list[float] = []
    is_over = threading.Event()

    def scrape() -> None:
        while not is_over.wait(_SCRAPE_EVERY_S):
            for address in addresses:
                began_s = time.monotonic()
                metrics.scrape(address)
                took_s.append(time.monotonic() - began_s)

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield took_s
    finally:
        is_over.set()
        thread.join()


async def unexplained(collector: Collector, answer: Answered) -> float:
    """The part of the client's time to first token that no span explains, or explains twice."""
    stages = {stage.value for stage in TTFT_STAGES}
    await until(lambda: stages <= collector.trace(answer.trace_id).keys(), within_s=30)
    spans = collector.trace(answer.trace_id)
    explained_s: float = sum(
        (spans[name].end_time_unix_nano - spans[name].start_time_unix_nano) / 1e9 for name in stages
    )
    return abs(explained_s - answer.ttft_s) / answer.ttft_s


async def measure(
    collector: Collector, traced: Cluster, untraced: Cluster, args: argparse.Namespace
) -> TracingFigures:
    """Warm up, then the rounds."""
    rounds: dict[str, list[Round]] = {traced.router.address: [], untraced.router.address: []}
    for address in rounds:
        await one_round(address, args.at_once, args.at_once, seed=0)
    processes = [*traced.processes, untraced.router]
    with scraping([process.metrics_address for process in processes]) as scrapes_s:
        for number in range(args.rounds):
            order = list(rounds) if number % 2 else list(rounds)[::-1]
            for index, address in enumerate(order):
                seed = 1 + 2 * number + index  # no prompt comes twice: prefixes are cached
                done = await one_round(address, args.requests, args.at_once, seed)
                rounds[address].append(done)
    with_traces = rounds[traced.router.address]
    answers = [answer for done in with_traces for answer in done.answers]
    parts = [await unexplained(collector, answer) for answer in answers]
    off = [done.tokens_per_s for done in rounds[untraced.router.address]]
    on = [done.tokens_per_s for done in with_traces]
    return TracingFigures(
        num_requests=len(answers),
        unexplained_median=median(parts),
        unexplained_worst=max(parts),
        explained_within_5_percent=sum(part <= 0.05 for part in parts) / len(parts),
        tokens_per_s_untraced=off,
        tokens_per_s_traced=on,
        cost_median=1 - median(on) / median(off),
        scrape_median_s=median(scrapes_s),
        scrape_worst_s=max(scrapes_s),
        scrapes_within_50_ms=sum(s < 0.05 for s in scrapes_s) / len(scrapes_s),
    )


async def main(args: argparse.Namespace) -> None:
    """Start, measure, write."""
    async with collecting() as (collector, endpoint):
        with (
            tempfile.TemporaryDirectory() as folder,
            running_cluster(
                Path(folder),
                args.model,
                # Untraced, a worker is not told to trace, and does not by itself.
                worker_flags={"otlp-endpoint": endpoint, "trace-sample-ratio": "0"},
                router_flags={"local-prefill-below-tokens": "0", "otlp-endpoint": endpoint},
            ) as traced,
        ):
            plain = {"local-prefill-below-tokens": "0"}
            with another_router(traced, Path(folder), Path(args.model), plain) as untraced:
                await traced.wait_ready()
                await untraced.wait_ready()
                figures = await measure(collector, traced, untraced, args)
        if args.record is not None:
            args.record.write_text("".join(f"{line}\n" for line in collector.json_lines()))
    result = {**asdict(figures), "model": args.model, **environment()}
    text = json.dumps(result, indent=1)
    print(text)  # noqa: T201
    if args.json is not None:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--record", type=Path, help="write the spans here, as OTLP in JSON")
    asyncio.run(main(parser.parse_args()))

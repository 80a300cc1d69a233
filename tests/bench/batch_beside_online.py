"""What online traffic loses beside a batch: its time to first token with and without one.

    python -m tests.bench.batch_beside_online [--model demo] [--rounds 5] [--seconds 30]
        [--rate 0.5] [--lines 2000] [--json OUT]

One prefill and one decode worker, a router and a batch server with one batch. Online requests
come at random times (Poisson, the same in both rounds of a pair), each with a prompt of its own;
rounds with the batch and rounds in which its server is not there alternate. Each of the former
ends with SIGKILL of the server, which goes on from what it stored in the next one.
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles

from diptych.client import BatchClient, BatchState
from tests.bench.environment import environment
from tests.bench.goodput import Point, offer
from tests.bench.slo import Lengths
from tests.bench.workload import Workload
from tests.cluster import Cluster, Process, as_args, running_cluster
from tests.waiting import until

_VOCAB = 500  # token ids that prompts are drawn from
_PATH = "/v1/completions"
_MAX_LEN = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideFigures:
    """Times in seconds, of online requests as their client saw them."""

    num_online: int  # of either kind of rounds
    ttft_p50_alone_s: float
    ttft_p50_beside_s: float
    ttft_p95_alone_s: float
    ttft_p95_beside_s: float
    ttft_p95_ratio: float
    num_unanswered: int
    lines_per_s_beside: float
    num_kills: int


def lines(num_lines: int, num_words: int, num_tokens: int, model: str) -> bytes:
    """A file of requests, no two alike."""
    made = []
    for number in range(num_lines):
        words = " ".join(f"w{(number * 31 + place) % 997}" for place in range(num_words))
        body = {
            "model": model,
            "prompt": f"{number} {words}",
            "max_tokens": num_tokens,
            "ignore_eos": True,
        }
        line = {"custom_id": f"line-{number}", "method": "POST", "url": _PATH, "body": body}
        made.append(json.dumps(line).encode() + b"\n")
    return b"".join(made)


class Batch:
    """One batch, and its server: there, or killed."""

    def __init__(self, folder: Path, router: Process, num_at_once: int) -> None:
        flags = {
            "database": f"sqlite:///{folder / 'batch.sqlite'}",
            "router": f"http://{router.http_address}",
            "max-concurrent": str(num_at_once),
        }
        self._process = Process("batch_server", "batch-server", folder, as_args(flags))
        self._process.start()
        self._process.wait_listening()
        self._batch_id = ""
        self.num_kills = 0

    async def submit(self, path: Path) -> None:
        async with BatchClient(self._process.address) as client:
            self._batch_id = (await client.submit(path, _PATH)).batch_id

    async def state(self) -> BatchState:
        async with BatchClient(self._process.address) as client:
            return await client.state(self._batch_id)

    async def wait_sending(self) -> None:
        """Until lines are with the router."""
        await until(lambda: self._process.metric("diptych_batch_lines_sent") > 0, 60, "lines sent")

    def kill(self) -> None:
        self._process.kill()
        self.num_kills += 1

    async def start_again(self) -> None:
        self._process.start(self._process.address)
        await asyncio.to_thread(self._process.wait_listening)

    def stop(self) -> None:
        self._process.stop()


async def online(cluster: Cluster, args: argparse.Namespace, seed: int) -> list[float | None]:
    """One round: the time to first token of each request; None: it had none."""
    work = Workload([Lengths(args.prompt, args.output)], _VOCAB)
    told, _ = await offer(cluster, work, Point(args.rate, seed), args.seconds, wanted=None)
    return [each.outcome.ttft_s for each in told]


async def measure(cluster: Cluster, folder: Path, args: argparse.Namespace) -> BesideFigures:
    """Warm up, then pairs of rounds, in changing order."""
    await cluster.wait_ready()
    alone: list[float | None] = []
    beside: list[float | None] = []
    await online(cluster, args, seed=99)
    batch = Batch(folder, cluster.router, args.at_once)
    path = folder / "in.jsonl"
    async with cluster.client() as client:
        (model,) = await client.models()
    path.write_bytes(lines(args.lines, args.words, args.tokens, model.name))
    num_done, beside_s = 0, 0.0
    try:
        await batch.submit(path)
        await batch.wait_sending()
        batch.kill()
        for number in range(args.rounds):
            for is_beside in (number % 2 == 0, number % 2 == 1):
                await cluster.wait_baseline(60)
                if not is_beside:
                    alone += await online(cluster, args, number)
                    continue
                await batch.start_again()
                await batch.wait_sending()
                before = (await batch.state()).num_completed
                beside += await online(cluster, args, number)
                num_done += (await batch.state()).num_completed - before
                beside_s += args.seconds
                batch.kill()
    finally:
        batch.stop()
    return figures(alone, beside, num_done / beside_s, batch.num_kills)


def figures(
    alone: Sequence[float | None],
    beside: Sequence[float | None],
    lines_per_s: float,
    num_kills: int,
) -> BesideFigures:
    """Of all rounds together."""
    seen = [[s for s in each if s is not None] for each in (alone, beside)]
    p95 = [quantiles(each, n=20)[-1] for each in seen]
    return BesideFigures(
        num_online=len(alone),
        ttft_p50_alone_s=median(seen[0]),
        ttft_p50_beside_s=median(seen[1]),
        ttft_p95_alone_s=p95[0],
        ttft_p95_beside_s=p95[1],
        ttft_p95_ratio=p95[1] / p95[0],
        num_unanswered=len(alone) + len(beside) - sum(map(len, seen)),
        lines_per_s_beside=lines_per_s,
        num_kills=num_kills,
    )


async def main(args: argparse.Namespace) -> None:
    """Start, measure, write."""
    with (
        tempfile.TemporaryDirectory() as name,
        running_cluster(
            Path(name), args.model, worker_flags={"max-model-len": str(_MAX_LEN)}
        ) as cluster,
    ):
        made = await measure(cluster, Path(name), args)
    result = {**asdict(made), **{key: str(value) for key, value in vars(args).items()}}
    text = json.dumps({**result, **environment()}, indent=1)
    print(text)  # noqa: T201
    if args.json is not None:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of them")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a round")
    parser.add_argument("--rate", type=float, default=0.5, help="online requests per second")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of an online request")
    parser.add_argument("--output", type=int, default=16, help="tokens of an online answer")
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--words", type=int, default=8, help="of a line's prompt")
    parser.add_argument("--tokens", type=int, default=16, help="of a line's answer")
    parser.add_argument("--at-once", type=int, default=16, help="lines at the router")
    parser.add_argument("--json", type=Path)
    asyncio.run(main(parser.parse_args()))

"""What the router costs per token: its CPU beside that of bare streams of the same messages.

    python -m tests.bench.router_tokens [--case grpc --case sse] [--rounds 3] [--json OUT]

A router in a process of its own, with a worker that only pretends, answers many streams at
once, over gRPC or as server-sent events; then a bare ``grpc.aio`` or Starlette server in a
process of its own sends as many streams the same messages at the same pace. Both are asked by
the same client. CPU time is that of the server's processes, so what the client and the worker
use does not count: a process has a core's tokens per second at one over it. Latency is from
when the worker (the bare server) had a token until the client read it, ms.
"""

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import psutil
import uvloop
from tokenizers import AddedToken

from diptych.rpc.channel import open_channel
from diptych.v1 import inference_pb2, inference_pb2_grpc
from tests.bench.bare_streams import STEP_S, seconds_since
from tests.bench.environment import environment
from tests.bench.paced_worker import LONG_ID, PacedDecode
from tests.bench.token_readers import TokensCame, read_grpc, read_sse
from tests.text_models import byte_level_tokenizer, write_folder

_START_TIMEOUT_S = 60.0
_ALL_RUN = 20  # tokens of each stream after which, and until which from the end, all of them run

Kind = Literal["grpc", "sse"]
Read = Callable[[str, int, TokensCame], Coroutine[Any, Any, None]]
"""Takes the answer of so many tokens to the request of that id."""


class Served(NamedTuple):
    """What is measured, and by whom its tokens were made."""

    read: Read
    pid: int
    worker: PacedDecode | None  # None: the server itself


class Router(NamedTuple):
    """A router in a process of its own, and its worker in this one."""

    address: str
    http_port: int  # 0: it serves none
    metrics_address: str
    pid: int
    worker: PacedDecode


@dataclass(frozen=True, slots=True)
class Case:
    """One way to serve the streams."""

    kind: Kind
    is_bare: bool = False
    flags: tuple[str, ...] = ()
    num_connections: int = 1  # of gRPC; over HTTP each stream has its own


CASES: Final = {
    "grpc": Case("grpc"),
    "bare grpc": Case("grpc", is_bare=True),
    "sse": Case("sse"),
    "bare sse": Case("sse", is_bare=True),
    "grpc, interval 16": Case("grpc", flags=("--stream-interval", "16")),
    "sse, interval 16": Case("sse", flags=("--stream-interval", "16")),
    "sse, 2 processes": Case("sse", flags=("--processes", "2")),
    "grpc, 32 connections": Case("grpc", num_connections=32),
    "grpc, 2 processes": Case("grpc", flags=("--processes", "2"), num_connections=32),
}


class Cost(NamedTuple):
    """Of one case, once."""

    cpu_us: float  # per token, all processes together, while all streams run
    request_ms: float  # CPU per request beyond that: its begin and its end
    busiest_share: float  # of the first, of the busiest process
    p50_ms: float
    p99_ms: float


async def cost(served: Served, num_streams: int, num_tokens: int) -> Cost:
    """Let it answer so many streams at once."""
    latencies_s: list[float] = []
    process = psutil.Process(served.pid)
    async with asyncio.timeout(_START_TIMEOUT_S):
        await served.read("first", 2, lambda num_tokens, stamped: None)
    processes = [process, *process.children(recursive=True)]
    looks, between = [_Look.at(processes, 0)], (_ALL_RUN, num_tokens - _ALL_RUN)

    def came() -> None:
        num_came = len(latencies_s)
        if len(looks) <= len(between) and num_came >= between[len(looks) - 1] * num_streams:
            looks.append(_Look.at(processes, num_came))

    async with asyncio.TaskGroup() as tasks:
        for index in range(num_streams):
            request_id = f"stream-{index:03}"
            follow = _follow(served.worker, request_id, latencies_s, came)
            tasks.create_task(served.read(request_id, num_tokens, follow))
    looks.append(_Look.at(processes, len(latencies_s)))
    assert len(latencies_s) == num_streams * num_tokens, "tokens are missing"
    first, begin, end, last = looks
    used = [after - before for before, after in zip(begin.cpu_s, end.cpu_s, strict=True)]
    token_s = sum(used) / (end.num_tokens - begin.num_tokens)
    whole_s = sum(last.cpu_s) - sum(first.cpu_s)
    percentiles = statistics.quantiles(latencies_s, n=100)
    return Cost(
        1e6 * token_s,
        1e3 * (whole_s - token_s * len(latencies_s)) / num_streams,
        max(used) / sum(used),
        1e3 * percentiles[49],
        1e3 * percentiles[98],
    )


class _Look(NamedTuple):
    """What processes have used when so many tokens had come."""

    num_tokens: int
    cpu_s: list[float]

    @classmethod
    def at(cls, processes: Sequence[psutil.Process], num_tokens: int) -> "_Look":
        times = [each.cpu_times() for each in processes]
        return cls(num_tokens, [each.user + each.system for each in times])


def _follow(
    worker: PacedDecode | None,
    request_id: str,
    latencies_s: list[float],
    came: Callable[[], None],
) -> TokensCame:
    """Notes how long each token took."""
    num_before = 0

    def follow(num_tokens: int, stamped: int) -> None:
        nonlocal num_before
        begin, num_before = num_before, num_before + num_tokens
        if worker is None:
            latencies_s.extend(itertools.repeat(seconds_since(stamped), num_tokens))
        else:
            now, sent_s = time.monotonic(), worker.sent_s[request_id]
            latencies_s.extend(now - sent for sent in sent_s[begin:num_before])
        came()

    return follow


@asynccontextmanager
async def serving_bare(case: Case) -> AsyncIterator[Served]:
    with child("-m", "tests.bench.bare_streams", case.kind) as process:
        assert process.stdout is not None
        port = int(await asyncio.to_thread(process.stdout.readline))
        async with reading(case, f"127.0.0.1:{port}", port) as read:
            yield Served(read, process.pid, None)


@asynccontextmanager
async def serving(case: Case, num_streams: int) -> AsyncIterator[Served]:
    """A router, and its worker in this process."""
    flags = ["--max-concurrent", str(num_streams), *case.flags]
    flags += ["--http-port", "0"] if case.kind == "sse" else ["--no-http"]
    async with (
        running_router(flags) as router,
        reading(case, router.address, router.http_port) as read,
    ):
        yield Served(read, router.pid, router.worker)


@asynccontextmanager
async def running_router(flags: Sequence[str], step_s: float = STEP_S) -> AsyncIterator[Router]:
    """Ready to serve."""
    worker = PacedDecode(step_s)
    await worker.start()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model")
        ports = Path(folder) / "ports.json"
        args = ["--model", f"{folder}/model", "--decode", worker.address, "--port-file", str(ports)]
        args += ["--log-level", "error", *flags]
        with child("-m", "router", *args) as process:
            address = await asyncio.to_thread(address_in, ports)
            await wait_ready(address)
            told = json.loads(ports.read_text())
            http_port = int(told.get("http_address", ":0").rpartition(":")[2])
            metrics = str(told.get("metrics_address", ""))
            yield Router(address, http_port, metrics, process.pid, worker)
            process.terminate()  # it takes its own processes with it
            await asyncio.to_thread(process.wait)
    await worker.kill()


@asynccontextmanager
async def reading(case: Case, address: str, http_port: int) -> AsyncIterator[Read]:
    """How the case's streams are read."""
    if case.kind == "sse":
        yield functools.partial(read_sse, http_port)
        return
    async with AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(open_channel(address))
            for _ in range(case.num_connections)
        ]
        turns = itertools.cycle(channels)

        def read(request_id: str, num_tokens: int, came: TokensCame) -> Coroutine[Any, Any, None]:
            return read_grpc(next(turns), request_id, num_tokens, came)

        yield read


@contextmanager
def child(*args: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process, killed at the end."""
    process = subprocess.Popen([sys.executable, *args], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def write_model(folder: Path) -> None:
    """A tokenizer, one token of which is long, with a context that no answer fills."""
    folder.mkdir()
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken("x" * 1000, normalized=False)])
    assert tokenizer.token_to_id("x" * 1000) == LONG_ID
    write_folder(folder, tokenizer)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "max_position_embeddings": 1_000_000}))


def address_in(ports: Path) -> str:
    """Wait for the port file of a process that starts; its address."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not ports.exists():
        assert time.monotonic() < deadline, "the router did not start"
        time.sleep(0.05)
    return str(json.loads(ports.read_text())["address"])


async def wait_ready(address: str) -> None:
    """Wait until the router there can place."""
    async with asyncio.timeout(_START_TIMEOUT_S), open_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        while not (await stub.ListModels(inference_pb2.ListModelsRequest())).models[0].ready:
            await asyncio.sleep(0.05)


async def measure(
    names: Sequence[str], num_streams: int, num_tokens: int, rounds: int
) -> dict[str, object]:
    """All cases in turn, again and again; medians."""
    costs: dict[str, list[Cost]] = {name: [] for name in names}
    for name in itertools.chain.from_iterable(itertools.repeat(names, rounds)):
        case = CASES[name]
        async with contextlib.AsyncExitStack() as stack:
            made = serving_bare(case) if case.is_bare else serving(case, num_streams)
            served = await stack.enter_async_context(made)
            costs[name].append(await cost(served, num_streams, num_tokens))
            sys.stderr.write(f"{name}: {costs[name][-1]}\n")
    return {
        "environment": environment(),
        "num_streams": num_streams,
        "num_tokens": num_tokens,
        "medians": {name: medians(each)._asdict() for name, each in costs.items()},
        "rounds": {name: [each._asdict() for each in found] for name, found in costs.items()},
    }


def medians(costs: Sequence[Cost]) -> Cost:
    """Of each figure by itself."""
    return Cost(*(round(statistics.median(figure), 3) for figure in zip(*costs, strict=True)))


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", action="append", choices=list(CASES), help="All, by default.")
    parser.add_argument("--json", help="Write the result there; - is standard output.")
    given = parser.parse_args(args)
    names = given.case or list(CASES)
    found = uvloop.run(measure(names, given.streams, given.tokens, given.rounds))
    text = json.dumps(found, indent=1)
    if given.json not in (None, "-"):
        Path(given.json).write_text(text + "\n")
    print(text)  # noqa: T201


if __name__ == "__main__":
    main()

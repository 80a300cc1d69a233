"""What the router costs per token: its CPU beside that of a bare gRPC stream of the same messages.

    python -m tests.bench.router_tokens [--streams 256] [--tokens 200] [--json OUT]

A router in a process of its own, with workers that only pretend, answers many streams
at once; then a bare ``grpc.aio`` server in a process of its own sends as many streams
the same messages at the same pace. Both are asked by the same client. CPU time is the
server process's own, so what the client and the workers use does not count.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil
import uvloop

from diptych.rpc.channel import open_channel
from diptych.rpc.server import Context
from diptych.v1 import inference_pb2, inference_pb2_grpc
from router.frontend.grpc import SERVICE
from tests.call import token_request
from tests.integration.fake_workers import FakeDecode, token_at
from tests.text_models import byte_level_tokenizer, write_folder

_PROMPT = list(range(30, 50))
_STEP_S = 0.05
_START_TIMEOUT_S = 60.0


async def generate_bare(
    request: inference_pb2.GenerateRequest, context: Context
) -> AsyncIterator[inference_pb2.GenerateResponse]:
    """Send Deltas of one token at the pace of the pretended workers, and nothing else."""
    loop = asyncio.get_running_loop()
    due_s = loop.time()
    for position in range(request.sampling.max_tokens):
        delta = inference_pb2.Delta(text="ab", token_ids=[token_at(position)], position=position)
        await context.write(inference_pb2.GenerateResponse(delta=delta))
        due_s += _STEP_S
        await asyncio.sleep(due_s - loop.time())
    return
    yield  # a generator without items, as the router's is


async def serve_bare() -> None:
    """Serve until killed; prints the port."""
    server = grpc.aio.server()
    handler = grpc.unary_stream_rpc_method_handler(
        generate_bare,
        request_deserializer=inference_pb2.GenerateRequest.FromString,
        response_serializer=inference_pb2.GenerateResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {"Generate": handler}),)
    )
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)  # noqa: T201
    await server.start()
    await server.wait_for_termination()


async def answer(channel: grpc.aio.Channel, num_tokens: int) -> int:
    """Take one answer whole; how many tokens came."""
    request = token_request(_PROMPT, max_tokens=num_tokens)
    request.sampling.return_margins = False
    num_received = 0
    async for response in inference_pb2_grpc.InferenceStub(channel).Generate(request):
        num_received += len(response.delta.token_ids)
    return num_received


async def cpu_per_token_s(address: str, pid: int, num_streams: int, num_tokens: int) -> float:
    """CPU time of process ``pid`` per token while it answers ``num_streams`` at once, s."""
    async with open_channel(address) as channel:
        await answer(channel, 2)
        before = psutil.Process(pid).cpu_times()
        async with asyncio.TaskGroup() as tasks:
            answers = [tasks.create_task(answer(channel, num_tokens)) for _ in range(num_streams)]
        after = psutil.Process(pid).cpu_times()
    num_received = sum(task.result() for task in answers)
    assert num_received == num_streams * num_tokens, "tokens are missing"
    return (after.user + after.system - before.user - before.system) / num_received


@contextmanager
def child(*args: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process, killed at the end."""
    process = subprocess.Popen([sys.executable, *args], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def measure_bare(num_streams: int, num_tokens: int) -> float:
    with child("-m", "tests.bench.router_tokens", "--serve-bare") as process:
        assert process.stdout is not None
        port = (await asyncio.to_thread(process.stdout.readline)).strip()
        return await cpu_per_token_s(f"127.0.0.1:{port}", process.pid, num_streams, num_tokens)


async def measure_router(num_streams: int, num_tokens: int) -> float:
    decode = FakeDecode()
    decode.behaviour.step_s = _STEP_S
    await decode.start()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model")
        ports = Path(folder) / "ports.json"
        args = ["--model", f"{folder}/model", "--decode", decode.address, "--port-file", str(ports)]
        args += ["--max-concurrent", str(num_streams), "--log-level", "warning", "--no-http"]
        with child("-m", "router", *args) as process:
            address = await asyncio.to_thread(address_in, ports)
            await wait_ready(address)
            cost_s = await cpu_per_token_s(address, process.pid, num_streams, num_tokens)
    await decode.kill()
    return cost_s


def write_model(folder: Path) -> None:
    """A tokenizer, with a context that no answer fills."""
    folder.mkdir()
    write_folder(folder, byte_level_tokenizer())
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


async def measure(num_streams: int, num_tokens: int, rounds: int) -> dict[str, object]:
    """Both in turn; medians and their ratio."""
    router, bare = [], []
    for _ in range(rounds):
        router.append(await measure_router(num_streams, num_tokens))
        bare.append(await measure_bare(num_streams, num_tokens))
    ours, theirs = sorted(router)[rounds // 2], sorted(bare)[rounds // 2]
    return {
        "num_streams": num_streams,
        "num_tokens": num_tokens,
        "router_cpu_us_per_token": [round(1e6 * value, 2) for value in router],
        "bare_cpu_us_per_token": [round(1e6 * value, 2) for value in bare],
        "ratio": round(ours / theirs, 3),
    }


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="Write the result there; - is standard output.")
    parser.add_argument("--serve-bare", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(args)
    if given.serve_bare:
        uvloop.run(serve_bare())  # as the router
        return
    text = json.dumps(asyncio.run(measure(given.streams, given.tokens, given.rounds)), indent=2)
    if given.json not in (None, "-"):
        Path(given.json).write_text(text + "\n")
    print(text)  # noqa: T201


if __name__ == "__main__":
    main()

"""Pulls between two processes where one pool, or both, are on the device: every way, and its rate.

Run as a program it is the source, for ``check``.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import xxhash

from diptych.engine.kv.cache import KVCache
from diptych.engine.kv.memory import KVMemory
from diptych.v1 import worker_pb2
from diptych.worker.pool_memory import pool_memory
from kvtransfer.reader.pairs import PeerKey
from kvtransfer.reader.pull_machine import PullRequest
from tests.attention_config import config_of
from tests.device_on_host import DeviceOnHost
from tests.integration.transfer_rig import (
    BLOCK_SIZE,
    NUM_SCRATCH,
    Reader,
    config,
    open_reader,
    open_source,
)

_HEAD_DIM = 64
_PATIENCE_S = 60.0  # for one case


@dataclass(frozen=True, slots=True)
class Case:
    """Where the pools are, and over what they are joined."""

    source: str  # device or host
    reader: str
    transport: str
    num_heads: int = 64  # blocks of 1 MiB
    num_blocks: int = 256  # of the pull


CASES = (
    Case("device", "device", "nixl"),
    Case("device", "device", "staged"),
    Case("device", "host", "staged"),
    Case("host", "device", "staged"),
    Case("device", "host", "inline"),
    Case("host", "device", "inline"),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one case."""

    case: str
    way: str  # as the pair says
    message: str  # why it is not proven
    bytes_per_s: float  # of the second pull
    holds: bool  # proven over that transport, and every byte was the source's


def cache_of(case: Case, where: str, device: str) -> KVCache:
    """Blocks for a pull and for probes."""

    def on_device(num_bytes: int) -> KVMemory:
        if device == "cpu":
            return DeviceOnHost(num_bytes)
        from diptych.engine.backends.cuda.kv_memory import CudaKVMemory  # needs triton

        return CudaKVMemory(num_bytes, torch.device(device))

    shape = config_of(case.num_heads, case.num_heads, _HEAD_DIM, None)
    num = case.num_blocks + NUM_SCRATCH
    if where == "host":
        return KVCache(shape, num, BLOCK_SIZE)
    return KVCache(shape, num, BLOCK_SIZE, torch.float32, on_device)


class NotJoinedError(Exception):
    """There is no proven pair; it says why."""


class Joined(NamedTuple):
    """A proven pair, and a pull that may be made again and again."""

    reader: Reader
    pair: worker_pb2.Pair
    request: PullRequest
    digest: str  # of what is pulled


def check(case: Case, device: str) -> Measured:
    """With the source in a process of its own; ``device``: of torch's."""
    return asyncio.run(_check(case, device))


async def _check(case: Case, device: str) -> Measured:
    try:
        async with joined(case, device) as (reader, pair, request, digest):
            for _ in range(2):  # the first is not warm
                stats = (await reader.pairs.open_pull(request).run()).stats
            content = reader.content(range(case.num_blocks))
            is_equal = xxhash.xxh3_128_hexdigest(content) == digest
            rate = stats.num_bytes / max(stats.read_s, 1e-9)
            return Measured(repr(case), pair.way, pair.message, rate, is_equal)
    except NotJoinedError as error:
        return Measured(repr(case), "", str(error), 0.0, False)


@asynccontextmanager
async def joined(case: Case, device: str) -> AsyncIterator[Joined]:
    """A source with random blocks in a process of its own. Raises NotJoinedError."""
    async with process_of(_source_command(case, device)) as source:
        told = await source.hear()
        cache = cache_of(case, case.reader, device)  # it has to live as long as its pool
        async with reader_of(case.transport, cache, PeerKey(told["address"], "source")) as (
            reader,
            pair,
        ):
            yield Joined(reader, pair, _request(case, told), told["digest"])


def _request(case: Case, told: Mapping[str, str]) -> PullRequest:
    return PullRequest(
        source_address=told["address"],
        source_incarnation="source",
        ticket=bytes.fromhex(told["ticket"]),
        first_missing_token=0,
        num_tokens=case.num_blocks * BLOCK_SIZE,
        prompt_digest=b"",
        local_block_ids=tuple(range(case.num_blocks)),
    )


class Source:
    """A process that says one JSON a line, and hears lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._to, self._from = process.stdin, process.stdout

    async def hear(self) -> dict[str, Any]:
        """Raises NotJoinedError: it ended."""
        line = await self._from.readline()
        if not line:
            raise NotJoinedError("the source ended at its start")
        told: dict[str, Any] = json.loads(line)
        return told

    async def say(self, word: str) -> None:
        self._to.write(f"{word}\n".encode())
        await self._to.drain()


@asynccontextmanager
async def process_of(
    command: Sequence[str], patience_s: float = _PATIENCE_S
) -> AsyncIterator[Source]:
    """It ends with the context. Raises NotJoinedError: that takes too long."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(patience_s):
            yield Source(process)
    except TimeoutError:
        raise NotJoinedError(f"not done within {patience_s:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@asynccontextmanager
async def reader_of(
    transport: str, cache: KVCache, source: PeerKey
) -> AsyncIterator[tuple[Reader, worker_pb2.Pair]]:
    """With a proven pair. Raises NotJoinedError: there is none."""
    memory = pool_memory(cache)
    async with open_reader(
        config(transport),
        memory=memory,
        num_blocks=memory.num_blocks,
        block_bytes=memory.block_bytes,
    ) as reader:
        reader.pairs.set_peers("router", [source])
        pair = await _settled(reader)
        if pair.state != worker_pb2.PAIR_STATE_PROVEN:
            raise NotJoinedError(pair.message)
        yield reader, pair


async def _settled(reader: Reader) -> worker_pb2.Pair:
    while True:
        for pair in reader.pairs.pairs():
            if pair.state != worker_pb2.PAIR_STATE_CONNECTING:
                return pair
        await asyncio.sleep(0.01)


def _source_command(case: Case, device: str) -> Sequence[str]:
    settings = {**asdict(case), "device": device}
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    return (sys.executable, "-m", "tests.gpu.handoff", *arguments)


async def _serve(case: Case, device: str) -> None:
    """Be the source until stdin ends."""
    cache = cache_of(case, case.source, device)
    memory = pool_memory(cache)
    async with open_source(
        config(case.transport),
        memory=memory,
        num_blocks=memory.num_blocks,
        block_bytes=memory.block_bytes,
    ) as source:
        content = source.fill(range(case.num_blocks))
        num_tokens = case.num_blocks * BLOCK_SIZE
        ticket = source.lease("lease", range(case.num_blocks), num_tokens, "reader")
        source.leases.announce("lease", num_tokens)
        digest = xxhash.xxh3_128_hexdigest(content)
        told = {"address": source.address, "ticket": ticket.hex(), "digest": digest}
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    for name in ("source", "reader", "transport"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("num-heads", "num-blocks"):
        parser.add_argument(f"--{name}", type=int, required=True)
    told = vars(parser.parse_args())
    device = told.pop("device")
    asyncio.run(_serve(Case(**told), device))


if __name__ == "__main__":
    main()

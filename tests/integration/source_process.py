"""A source of blocks in a process of its own, to be killed, stopped, restarted."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import psutil

from diptych.v1 import worker_pb2
from kvtransfer.reader.pairs import PeerKey
from kvtransfer.reader.pull_machine import PullRequest
from tests.integration.transfer_rig import BLOCK_SIZE, Reader
from tests.integration.transfer_source import LEASED

LOCAL = tuple(range(len(LEASED)))
NUM_TOKENS = len(LEASED) * BLOCK_SIZE


@dataclass
class SourceProcess:
    process: asyncio.subprocess.Process
    key: PeerKey
    ticket: bytes
    digest: str

    @property
    def request(self) -> PullRequest:
        return PullRequest(
            source_address=self.key.address,
            source_incarnation=self.key.incarnation,
            ticket=self.ticket,
            first_missing_token=0,
            num_tokens=NUM_TOKENS,
            prompt_digest=b"",
            local_block_ids=LOCAL,
        )

    def signal(self, number: int) -> None:
        """To the process, and to that of its agent where it has one."""
        process = psutil.Process(self.process.pid)
        for each in (process, *process.children()):
            each.send_signal(number)

    def announce_rest(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")


@asynccontextmanager
async def source_process(
    transport: str, *, incarnation: str = "source", **options: object
) -> AsyncIterator[SourceProcess]:
    arguments = ["--transport", transport, "--incarnation", incarnation]
    for name, value in options.items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.integration.transfer_source",
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        described = json.loads(await process.stdout.readline())
        yield SourceProcess(
            process,
            PeerKey(described["address"], incarnation),
            bytes.fromhex(described["ticket"]),
            described["digest"],
        )
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def connect(reader: Reader, source: SourceProcess) -> worker_pb2.Pair:
    reader.pairs.set_peers("router", [source.key])
    return await reader.wait_for(source.key, worker_pb2.PAIR_STATE_PROVEN)

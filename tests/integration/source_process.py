"""A source of blocks in a process of its own, to be killed, stopped, restarted."""

import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from diptych.v1 import worker_pb2
from kvtransfer.reader.pairs import PeerKey
from kvtransfer.reader.pull_machine import PullRequest
from tests.fork_server import Started, start_role
from tests.integration.transfer_rig import BLOCK_SIZE, Reader
from tests.integration.transfer_source import LEASED
from tests.waiting import until

LOCAL = tuple(range(len(LEASED)))
NUM_TOKENS = len(LEASED) * BLOCK_SIZE
START_S = 60.0


@dataclass
class SourceProcess:
    process: Started
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
        self.process.send_signal(signal.SIGUSR1)


@asynccontextmanager
async def source_process(
    transport: str, *, incarnation: str = "source", is_forked: bool = True, **options: object
) -> AsyncIterator[SourceProcess]:
    """``is_forked``: from one that has imported what a worker does, and is as large as that."""
    arguments = ["--transport", transport, "--incarnation", incarnation]
    for name, value in options.items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "described.json"
        process = started([*arguments, "--described", str(path)], path.with_name("log"), is_forked)
        try:
            described = await description(process, path)
            yield SourceProcess(
                process,
                PeerKey(described["address"], incarnation),
                bytes.fromhex(described["ticket"]),
                described["digest"],
            )
        finally:
            process.kill()
            process.wait()


def started(arguments: list[str], log_path: Path, is_forked: bool) -> Started:
    with log_path.open("ab") as log:
        return start_role(
            "tests.integration.transfer_source",
            arguments,
            log,
            imports_like="prefill_worker" if is_forked else None,
        )


async def description(process: Started, path: Path) -> dict[str, str]:
    """What it says once it can be read from. Raises AssertionError: it cannot."""

    def is_there() -> bool:
        assert process.poll() is None, path.with_name("log").read_text()
        return path.exists()

    def read() -> dict[str, str]:
        said: dict[str, str] = json.loads(path.read_text())
        return said

    await until(is_there, START_S, "the source starts")
    return read()


async def connect(reader: Reader, source: SourceProcess) -> worker_pb2.Pair:
    reader.pairs.set_peers("router", [source.key])
    return await reader.wait_for(source.key, worker_pb2.PAIR_STATE_PROVEN)

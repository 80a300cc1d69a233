"""Servers as the comparison sees them: asked for tokens, started for a turn, ended after it."""

import asyncio
import json
import os
import shlex
import signal
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import grpc
import httpx
import psutil

from diptych.rpc.channel import open_channel
from diptych.v1 import inference_pb2, inference_pb2_grpc

# Asks for exactly max_tokens tokens; unknown fields are ignored by vLLM and llama.cpp.
EXACT: dict[str, Any] = {"ignore_eos": True}
_TIMEOUT_S = 280.0  # of one answer
_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 15.0
_POLL_S = 0.1
_KEPT_S = 2.0  # llama.cpp closes an idle connection after 5
_TAIL_BYTES = 1500


class ServerError(Exception):
    """It did not start, ended, or gave no proper answer."""


class UnavailableError(ServerError):
    """Nobody listens, or it says that it is still starting."""


class Reply(NamedTuple):
    """One answer. Times in s on the monotonic clock."""

    sent_s: float
    first_s: float  # first token
    last_s: float
    num_prompt_tokens: int  # as the server says
    num_output_tokens: int


class Target(Protocol):
    """A server that is asked. ``ask`` raises ServerError."""

    @property
    def name(self) -> str: ...
    async def ask(self, text: str, num_output_tokens: int) -> Reply: ...


class OpenAITarget:
    """Any server of the OpenAI completions API, streaming."""

    def __init__(
        self, name: str, client: httpx.AsyncClient, model_id: str, extra: dict[str, Any]
    ) -> None:
        """client: its base_url ends with the API's version, such as /v1."""
        self.name = name
        self._client = client
        self._body = {
            "model": model_id,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **extra,
        }

    async def ask(self, text: str, num_output_tokens: int) -> Reply:
        """Raises ServerError, also if the server does not say how many tokens there were."""
        body = {**self._body, "prompt": text, "max_tokens": num_output_tokens}
        try:
            return await self._ask(body)
        except httpx.RemoteProtocolError:
            # It closed a kept connection just as it was asked, before it said anything.
            try:
                return await self._ask(body)
            except httpx.HTTPError as error:
                raise ServerError(f"{self.name}: {error!r}") from error
        except httpx.ConnectError as error:
            raise UnavailableError(f"{self.name}: {error}") from error
        except httpx.HTTPError as error:
            raise ServerError(f"{self.name}: {error!r}") from error

    async def _ask(self, body: dict[str, Any]) -> Reply:
        """Raises ServerError, httpx.HTTPError; RemoteProtocolError only before any token."""
        sent_s, times = time.monotonic(), []
        usage: dict[str, int] = {}
        async with self._client.stream("POST", "/completions", json=body) as reply:
            if reply.status_code != httpx.codes.OK:
                is_starting = reply.status_code == httpx.codes.SERVICE_UNAVAILABLE
                kind = UnavailableError if is_starting else ServerError
                raise kind(f"{self.name}: {reply.status_code}: {await reply.aread()!r}")
            try:
                async for line in reply.aiter_lines():
                    event = _event(line)
                    if event.get("choices"):
                        times.append(time.monotonic())
                    usage = event.get("usage") or usage
            except httpx.RemoteProtocolError as error:
                raise ServerError(f"{self.name}: {error!r}") from error
        if not usage or not times:
            raise ServerError(f"{self.name}: an answer without usage or tokens")
        return Reply(
            sent_s, times[0], times[-1], usage["prompt_tokens"], usage["completion_tokens"]
        )


def _event(line: str) -> dict[str, Any]:
    """The content of a line of an event stream; empty if it has none."""
    kind, _, content = line.partition(":")
    if kind != "data" or content.strip() in ("", "[DONE]"):
        return {}
    event: dict[str, Any] = json.loads(content)
    return event


class DiptychTarget:
    """A router, over gRPC."""

    def __init__(self, name: str, channel: grpc.aio.Channel) -> None:
        self.name = name
        self._stub = inference_pb2_grpc.InferenceStub(channel)

    async def ask(self, text: str, num_output_tokens: int) -> Reply:
        request = inference_pb2.GenerateRequest(
            text=text,
            sampling=inference_pb2.SamplingOptions(
                temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True
            ),
        )
        sent_s, times = time.monotonic(), []
        usage = inference_pb2.Usage()
        try:
            async for response in self._stub.Generate(request, timeout=_TIMEOUT_S):
                if response.delta.token_ids:
                    times.append(time.monotonic())
                elif response.HasField("summary"):
                    usage = response.summary.usage
        except grpc.aio.AioRpcError as error:
            is_starting = error.code() == grpc.StatusCode.UNAVAILABLE
            kind = UnavailableError if is_starting else ServerError
            raise kind(f"{self.name}: {error.code().name}: {error.details()}") from error
        if not times:
            raise ServerError(f"{self.name}: an answer without tokens")
        return Reply(sent_s, times[0], times[-1], usage.num_prompt_tokens, usage.num_output_tokens)


class ServerProcess:
    """A server that was started here, with all that it starts itself."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        """log: where its output goes."""
        self._process, self._log = process, log

    @classmethod
    async def start(
        cls, command: str, log: Path, environment: Mapping[str, str]
    ) -> "ServerProcess":
        """command: split like a shell does, but not run by one. Raises ServerError.

        environment: added to this process's.
        """
        with log.open("wb") as out:
            try:
                process = await asyncio.create_subprocess_exec(
                    *shlex.split(command),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                    env={**os.environ, **environment},
                )
            except OSError as error:
                raise ServerError(str(error)) from error
        return cls(process, log)

    def check(self) -> None:
        """Raises ServerError if it has ended."""
        if self._process.returncode is not None:
            tail = self._log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
            raise ServerError(f"ended with code {self._process.returncode}; {self._log}:\n{tail}")

    def signal(self, signum: signal.Signals) -> None:
        """To it and to all that it started."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._process.pid)
            for each in (process, *process.children(recursive=True)):
                each.send_signal(signum)

    async def stop(self) -> None:
        """Ask it to end; then end what is left of it."""
        self.signal(signal.SIGCONT)
        try:
            family = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            family = []
        try:
            if self._process.returncode is None:
                self._process.terminate()
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        for each in family:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        await asyncio.to_thread(psutil.wait_procs, family, _STOP_TIMEOUT_S)


class Running(NamedTuple):
    """A server that answers; what was started here can stand still while others are asked."""

    target: Target
    process: ServerProcess | None  # None: it ran before

    def pause(self) -> None:
        """Let it and all that it started stand still."""
        if self.process is not None:
            self.process.signal(signal.SIGSTOP)

    async def resume(self) -> None:
        """Wait until it answers again. Raises ServerError."""
        if self.process is not None:
            self.process.signal(signal.SIGCONT)
            await _ready(self.target, self.process)


class Server(NamedTuple):
    """How to reach a server, and to start it where it does not run already."""

    name: str
    ours: bool
    address: str  # ours: host:port of a router; theirs: a URL that ends with the API's version
    command: str | None  # None: it runs
    log: Path
    model_id: str = ""
    extra: dict[str, Any] = EXACT
    environment: Mapping[str, str] = {}  # it is started with these variables besides

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Target]:
        if self.ours:
            async with open_channel(self.address) as channel:
                yield DiptychTarget(self.name, channel)
        else:
            # Kept, as ours is; but none that was idle for so long that the server may close it.
            limits = httpx.Limits(
                max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEPT_S
            )
            async with httpx.AsyncClient(
                base_url=self.address, timeout=_TIMEOUT_S, limits=limits
            ) as client:
                yield OpenAITarget(self.name, client, self.model_id, self.extra)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Running]:
        """Answering until the context closes. Raises ServerError."""
        async with self.connected() as target:
            if self.command is None:
                yield Running(target, None)
                return
            if await _answers(target):
                raise ServerError(f"{self.name}: {self.address} is taken: something answers there")
            process = await ServerProcess.start(self.command, self.log, self.environment)
            try:
                await _ready(target, process)
                yield Running(target, process)
            finally:
                await process.stop()


async def _answers(target: Target) -> bool:
    """Whether it is there. Raises ServerError if it gives no proper answer."""
    try:
        await target.ask("Hello", 1)
    except UnavailableError:
        return False
    return True


async def _ready(target: Target, process: ServerProcess) -> None:
    """Wait for the first answer."""
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            while not await _answers(target):
                process.check()
                await asyncio.sleep(_POLL_S)
    except TimeoutError as error:
        raise ServerError(f"{target.name}: no answer after {_START_TIMEOUT_S:.0f} s") from error
    process.check()

"""``diptych batch``: have a file of requests answered by a batch server."""

import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field
from pydantic_settings import CliPositionalArg

from batch_server.records import Endpoint
from diptych import settings
from diptych.address import is_host
from diptych.cli.batch_client import AwayError, BatchClient, BatchError
from diptych.cli.batch_over_grpc import GrpcBatchClient
from diptych.cli.batch_over_http import HttpBatchClient
from diptych.cli.connection import read_key
from diptych.cli.shown_line import shown
from diptych.client.batches import ENDED, BatchState
from diptych.errors import ConfigurationError
from diptych.process import EXIT_CONFIGURATION, EXIT_FAILED
from diptych.progress import ConsoleProgress

_FIRST_PAUSE_S = 0.2
_MAX_PAUSE_S = 5.0
_PATIENCE_S = 300.0  # with a server that is away, as one is that is started again

_USAGE = """usage: diptych batch submit FILE.jsonl [--endpoint PATH] [--wait]
       diptych batch status BATCH [--wait]
       diptych batch results BATCH [--errors]
       diptych batch cancel BATCH

submit   upload a file of requests, and have it answered; prints the batch's id
status   tell how far a batch is; with --wait show its progress until it has ended
results  write what was answered, or what went wrong, to standard output
cancel   send no more of its lines"""


class _ServerConfig(BaseModel):
    """Settings of every command that asks a batch server."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field(
        "http://127.0.0.1:8001",
        description="The batch server: http://host:port, or grpc://host:port of its gRPC port; "
        "https:// and grpcs:// speak TLS.",
    )
    api_key_file: Path | None = Field(
        None, description="File with the key that the server asks for, and nothing else."
    )
    ca: Path | None = Field(
        None, description="With TLS: the authorities of this PEM file are believed."
    )
    server_name: str = Field(
        "",
        description="With TLS: name that the server's certificate has to have, where it is reached "
        "by another, as through a forwarded port. Unset: the host of --url.",
    )

    def client(self) -> BatchClient:
        """Raises ConfigurationError: a file cannot be read."""
        return _open(self.url, read_key(self.api_key_file), self.ca, self.server_name)


def _open(url: str, key: str, ca: Path | None, server_name: str) -> BatchClient:
    """Raises ConfigurationError."""
    expected = ConfigurationError("--url: expected http, https, grpc or grpcs://host:port")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise expected from None
    if host is None or not is_host(host):
        raise expected
    is_bare = not (parts.path.rstrip("/") or parts.query or parts.fragment or "@" in parts.netloc)
    if server_name and parts.scheme in ("http", "grpc"):
        raise ConfigurationError("--server-name: --url has no TLS; https:// and grpcs:// have")
    match parts.scheme:
        case "http" | "https" if "@" not in parts.netloc:
            return HttpBatchClient(url, key, ca, server_name)
        case "grpc" if port and is_bare:
            return GrpcBatchClient(url, parts.netloc, key)
        case "grpcs" if port and is_bare:
            return GrpcBatchClient(url, parts.netloc, key, ca or True, server_name)
    raise expected


class SubmitConfig(_ServerConfig):
    """Upload a file of requests and have it answered. Prints the batch's id."""

    file: CliPositionalArg[Path] = Field(description="JSON Lines, each a request with its id.")
    endpoint: Endpoint = Field(
        "/v1/chat/completions", description="What the requests are asked of."
    )
    completion_window: str = Field(
        "24h", description="What is not answered within this (30m, 24h, 7d) never is."
    )
    wait: bool = Field(False, description="Show its progress until it has ended.")


class StatusConfig(_ServerConfig):
    """Tell how far a batch is. 0, or 1 where it has ended and not all of it was answered."""

    batch: CliPositionalArg[str] = Field(min_length=1, description="Its id.")
    wait: bool = Field(False, description="Show its progress until it has ended.")


class ResultsConfig(_ServerConfig):
    """Write what was answered to standard output: JSON Lines, in the order of the requests."""

    batch: CliPositionalArg[str] = Field(min_length=1, description="Its id.")
    errors: bool = Field(False, description="The requests that were not answered, and why.")


class CancelConfig(_ServerConfig):
    """Send no more of a batch's lines; what was answered is kept."""

    batch: CliPositionalArg[str] = Field(min_length=1, description="Its id.")


C = TypeVar("C", bound=_ServerConfig)


def run(args: list[str]) -> int:
    """Run the subcommand; 0, 1 if it failed, or 2 with its usage."""
    name, rest = (args[0], args[1:]) if args else ("", [])
    try:
        match name:
            case "submit":
                return _submit(_load(SubmitConfig, name, rest))
            case "status":
                return _status(_load(StatusConfig, name, rest))
            case "results":
                return _results(_load(ResultsConfig, name, rest))
            case "cancel":
                return _cancel(_load(CancelConfig, name, rest))
    except BatchError as error:
        print(shown(f"diptych batch: {error}"), file=sys.stderr)  # noqa: T201
        return EXIT_FAILED
    print(_USAGE)  # noqa: T201
    return 0 if name in ("-h", "--help") else EXIT_CONFIGURATION


def _load(config: type[C], name: str, args: list[str]) -> C:
    prefix = f"DIPTYCH_BATCH_{name.upper()}_"
    return settings.load(config, args, prog=f"diptych batch {name}", env_prefix=prefix)


def _submit(config: SubmitConfig) -> int:
    with config.client() as client:
        try:
            if config.file.exists() and not config.file.is_file():  # its size is told first
                raise ConfigurationError(f"--file: {config.file}: expected a regular file, no pipe")
            state = client.submit(config.file, config.endpoint, config.completion_window)
        except OSError as error:
            raise ConfigurationError(f"--file: {config.file}: {error.strerror}") from None
        print(state.batch_id, flush=True)  # noqa: T201
        return _told(wait_for(client, state) if config.wait else state)


def _status(config: StatusConfig) -> int:
    with config.client() as client:
        state = client.state(config.batch)
        return _told(wait_for(client, state) if config.wait else state)


def _results(config: ResultsConfig) -> int:
    with config.client() as client:
        state = client.state(config.batch)
        if state.status not in ENDED:
            raise BatchError(f"{config.batch} is {state.status}: it has no results yet")
        if state.status == "failed":
            return _told(state)
        file_id = state.error_file_id if config.errors else state.output_file_id
        if file_id is not None:
            return _written(client.content(file_id))
    return 0


def _written(pieces: Iterable[bytes]) -> int:
    """Write to standard output; the exit code."""
    try:
        for piece in pieces:
            sys.stdout.buffer.write(piece)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has read enough, as ``head`` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end
        return EXIT_FAILED
    except OSError as error:
        raise BatchError(f"the results cannot be written: {error.strerror or error}") from None
    return 0


def _cancel(config: CancelConfig) -> int:
    with config.client() as client:
        client.cancel(config.batch)
    return 0


def wait_for(
    client: BatchClient,
    state: BatchState,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> BatchState:
    """The state when it has ended; until then its progress is shown.

    Raises BatchError; AwayError where the server stays away, which one may do
    that takes a connection and says nothing: asking counts as well as pauses.
    """
    pause_s, away_s = _FIRST_PAUSE_S, 0.0
    with ConsoleProgress() as progress:
        while state.status not in ENDED:
            progress("answered", state.done_ratio)
            sleep(pause_s)
            asked_at = clock()
            try:
                state, away_s = client.state(state.batch_id), 0.0
            except AwayError:
                away_s += pause_s + clock() - asked_at
                if away_s > _PATIENCE_S:
                    raise
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        progress("answered", state.done_ratio)
    return state


def _told(state: BatchState) -> int:
    """Say how it is, on standard error; the exit code."""
    counts = f"{state.num_completed} answered, {state.num_failed} failed of {state.num_lines}"
    print(f"{state.batch_id} {state.status}: {counts}", file=sys.stderr)  # noqa: T201
    for message in state.errors:
        print(shown(message), file=sys.stderr)  # noqa: T201
    is_whole = state.status == "completed" and not state.num_failed
    return EXIT_FAILED if state.status in ENDED and not is_whole else 0

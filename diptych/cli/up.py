"""``diptych up``: a local cluster in the foreground, until Ctrl-C."""

import asyncio
import json
import os
import shlex
import shutil
import signal
import socket
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from diptych import settings
from diptych.address import LAST_PORT, check_host
from diptych.cli.cluster_child import ChildFailedError
from diptych.cli.local_cluster import BatchPlan, ClusterPlan, LocalCluster, run_cluster
from diptych.cli.model import fetch_with_progress
from diptych.errors import ConfigurationError
from diptych.formats import DeviceName, Quantization
from diptych.process import EXIT_FAILED
from diptych.telemetry.log_writer import RawStandardError
from diptych.v1 import inference_pb2

_NAME = "diptych"
_CARD_SHARE = 0.9  # of a GPU's memory, which all workers have together
_STANDARD_ERROR = RawStandardError()  # what is lost is not tried again as the process ends


class UpConfig(BaseModel):
    """Start a router and its workers on this machine, as child processes.

    Ctrl-C ends them all. The cores are divided between the workers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(
        "demo", min_length=1, description="Hugging Face folder, .gguf file, hub id, or demo."
    )
    prefill: int | None = Field(
        None,
        ge=0,
        le=64,
        description="Prefill workers; 0 makes each decode worker a whole engine. Unset: 1, or none "
        "with --soft.",
    )
    decode: int | None = Field(
        None, ge=0, le=64, description="Decode workers. Unset: 1, or none with --soft."
    )
    soft: int = Field(
        0,
        ge=0,
        le=64,
        description="Workers of both roles, which diptych admin roles changes while they run.",
    )
    host: Annotated[str, AfterValidator(check_host)] = Field(
        "127.0.0.1", description="Address that all processes listen on."
    )
    port: int = Field(50051, ge=0, le=LAST_PORT, description="The router's port; 0 picks one.")
    http_port: int = Field(
        8000, ge=0, le=LAST_PORT, description="Port of the router's HTTP API; 0 picks one."
    )
    batch_port: int | None = Field(
        None,
        ge=0,
        le=LAST_PORT,
        description="Start a batch server, too, with its HTTP API at this port; 0 picks one.",
    )
    batch_database: str = Field(
        "sqlite:///diptych-batch.sqlite",
        min_length=1,
        description="Where it keeps files and batches, as of diptych batch-server.",
    )
    quantization: Quantization = Field(
        "none",
        description="Linear layers of every worker as loaded (none), in int8, int8-weights or fp8.",
    )
    device: DeviceName = Field(
        "cpu",
        description="Where every worker runs; on a GPU they share the memory of one card out among "
        "themselves.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least level that is logged."
    )
    otlp_endpoint: str | None = Field(
        None, description="OTLP/gRPC collector for traces, http://host:4317; unset is off."
    )
    worker_args: str = Field(
        "", description='Further flags of every worker, such as --worker-args="--num-blocks 512".'
    )
    router_args: str = Field("", description="Further flags of the router.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self._num_of_one_role(self.decode) + self.soft:
            raise ValueError("decode: 0 leaves nobody who decodes; or give soft workers")
        for flag in ("worker_args", "router_args"):
            try:
                shlex.split(getattr(self, flag))
            except ValueError as error:
                name = flag.replace("_", "-")
                raise ValueError(f"--{name}: {str(error).lower()}") from None
        return self

    def _num_of_one_role(self, asked: int | None) -> int:
        return (0 if self.soft else 1) if asked is None else asked

    def _device_args(self) -> tuple[str, ...]:
        """One card is all that they have: each gets its part of what one worker would take."""
        if self.device == "cpu":
            return ()
        num_workers = sum(map(self._num_of_one_role, (self.prefill, self.decode))) + self.soft
        share = _CARD_SHARE / num_workers
        return ("--device", self.device, "--gpu-memory-utilization", f"{share:.4f}")

    @property
    def listen_host(self) -> str:
        """As it stands before a port: an IPv6 address in brackets, given with them or not."""
        bare = self.host.strip("[]")
        return f"[{bare}]" if ":" in bare else bare

    def plan(self) -> ClusterPlan:
        """The processes that these settings ask for."""
        common = ["--log-level", self.log_level]
        if self.otlp_endpoint is not None:
            common += ["--otlp-endpoint", self.otlp_endpoint]
        return ClusterPlan(
            model=self.model,
            num_prefill=self._num_of_one_role(self.prefill),
            num_decode=self._num_of_one_role(self.decode),
            num_soft=self.soft,
            host=self.listen_host,
            port=self.port,
            http_port=self.http_port,
            batch=None
            if self.batch_port is None
            else BatchPlan(self.batch_port, self.batch_database),
            common_args=tuple(common),
            worker_args=(
                "--quantization",
                self.quantization,
                *self._device_args(),
                *shlex.split(self.worker_args),
            ),
            router_args=tuple(shlex.split(self.router_args)),
        )


def run(args: list[str]) -> int:
    """Run until a signal; 0 then, 1 if a child ended by itself."""
    config = settings.load(UpConfig, args, prog="diptych up", env_prefix="DIPTYCH_UP_")
    _check_open(config)
    _check_ports(config)
    fetch_with_progress(config.model)
    return asyncio.run(_up(config))


def _check_open(config: UpConfig) -> None:
    """It has no key, and no certificates, with which to look after its processes.

    Raises ConfigurationError.
    """
    for flag in ("router_args", "worker_args"):
        for arg in shlex.split(getattr(config, flag)):
            if arg.startswith(("--api-keys", "--public-tls.", "--tls.")):
                name = flag.replace("_", "-")
                raise ConfigurationError(
                    f"--{name}: {arg.partition('=')[0]}: not with diptych up: start the processes "
                    "one by one"
                )


def _check_ports(config: UpConfig) -> None:
    """Before any worker starts: the router would only find out after them.

    Raises ConfigurationError.
    """
    ports = {"--port": config.port}
    if "--no-http" not in shlex.split(config.router_args):
        ports["--http-port"] = config.http_port
    elif config.batch_port is not None:
        raise ConfigurationError("--batch-port: a batch server asks its router over HTTP")
    if config.batch_port is not None:
        ports["--batch-port"] = config.batch_port
    with ExitStack() as bound:  # all at a time: no two may be the same
        for flag, port in ports.items():
            try:
                family, *_, address = socket.getaddrinfo(
                    config.host.strip("[]"), port, type=socket.SOCK_STREAM
                )[0]
                bound.enter_context(socket.create_server(address[:2], family=family))
            except OSError as error:
                raise ConfigurationError(
                    f"{flag}: cannot bind {config.listen_host}:{port}: {error.strerror}; "
                    "0 picks a free port"
                ) from None


async def _up(config: UpConfig) -> int:
    began = time.monotonic()

    async def use(cluster: LocalCluster) -> None:
        say("up", f"router listens on {cluster.address}; waiting for the workers")
        model = await cluster.ready()
        for child in cluster.children:
            metrics = f"http://{child.metrics_address}/metrics"
            say("up", f"{child.name}: {child.address}, metrics {metrics}")
        say("up", f"ready after {time.monotonic() - began:.1f} s; try:")
        diptych = own_command()
        for line in lines_to_paste(diptych, cluster.address, cluster.http_address, model):
            say("up", line)
        if cluster.batch is not None:
            url = f"http://{cluster.batch.http_address}"
            say("up", f"{diptych} batch submit --url {url} requests.jsonl --wait")
        await asyncio.Event().wait()

    stopped = cancel_on_signals()
    try:
        await run_cluster(config.plan(), say, use)
    except asyncio.CancelledError:
        if not stopped.is_set():
            raise
        return 0
    except ChildFailedError as error:
        say("up", f"{error}; its last lines:")
        for line in error.tail:
            say(error.name, line)
        return EXIT_FAILED
    return 0


def own_command() -> str:
    """What a shell calls this program by: its name, unless that leads nowhere or elsewhere."""
    called, found = Path(sys.argv[0]), shutil.which(_NAME)
    if called.name != _NAME or (found is not None and called.samefile(found)):
        return _NAME
    return shlex.quote(str(called))


def lines_to_paste(
    diptych: str, address: str, http_address: str, model: inference_pb2.Model
) -> list[str]:
    """Ways to talk with the model of the router at ``address``: a shell's two, a browser's one.

    ``diptych`` is what a shell calls this program by; ``http_address`` that of its HTTP API,
    empty: it has none.
    """
    lines = [f"{diptych} generate --address {address} 'Hello!'"]
    if model.has_chat_template:
        lines = [f"{diptych} chat --address {address}"]
    if http_address:
        lines += [_curl(http_address, model), f"http://{http_address}/"]
    return lines


def _curl(address: str, model: inference_pb2.Model) -> str:
    """A command that asks the HTTP API for an answer."""
    path = "completions"
    asked: dict[str, object] = {"prompt": "Hello!"}
    if model.has_chat_template:
        path, asked = "chat/completions", {"messages": [{"role": "user", "content": "Hello!"}]}
    body = json.dumps({"model": model.name, **asked, "max_tokens": 64})
    url = f"http://{address}/v1/{path}"
    return f"curl {url} -H 'content-type: application/json' -d {shlex.quote(body)}"


def say(name: str, line: str) -> None:
    """Print one line of a process, prefixed by its name.

    What cannot be written is lost, as where its terminal was closed: the cluster goes on, and ends
    as it should.
    """
    with suppress(OSError):
        for part in line.splitlines() or [""]:
            _STANDARD_ERROR.write(f"{name:<10}| {part}\n")


def cancel_on_signals() -> asyncio.Event:
    """Cancel the calling task at SIGINT, SIGTERM or SIGHUP; the event says that it happened.

    A second signal ends this process at once; the children see their standard
    input end and follow. Whoever started it may have told it to ignore a SIGHUP, as ``nohup``
    does: so it stays.
    """
    task, happened = asyncio.current_task(), asyncio.Event()
    assert task is not None

    def on_signal(signum: signal.Signals) -> None:
        if happened.is_set():
            os._exit(128 + signum)
        say("up", f"stopping ({signum.name})")
        happened.set()
        task.cancel()

    ends = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        ends.append(signal.SIGHUP)
    for signum in ends:
        asyncio.get_running_loop().add_signal_handler(signum, on_signal, signum)
    return happened

"""The shell of a server process: settings, event loop, signals, and what every role serves.

``main`` is what ``python -m router`` and its siblings call, having loaded the role as
:mod:`diptych.loading` says; :class:`diptych.service_host.ServiceHost` is what a role's
``serve`` is built around. Neither knows what the role does.

A role looks like this::

    async def serve(config: XConfig, stop: asyncio.Event, ready: Ready) -> None:
        async with ServiceHost(config) as host:
            add_XServicer_to_server(servicer, host.server)
            await host.start([X_SERVICE_NAME])      # accepts connections, port file written
            ready(host.port)
            ...                                     # load; tasks in the role's own task group
            settle()
            host.set_serving(True)
            await stop.wait()
            host.set_serving(False)                 # refuse new work
            ...                                     # drain within config.timers.drain_s
"""

import asyncio
import atexit
import gc
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NoReturn, Protocol, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from diptych import settings
from diptych.address import LAST_PORT
from diptych.errors import ConfigurationError
from diptych.event_loop import EventLoop
from diptych.loop_threads import loop_threads, stuck_at
from diptych.rpc.identity import TlsFiles
from diptych.telemetry import logs
from diptych.telemetry.endpoints import check_endpoint
from diptych.timers import Timers

logger = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_CONFIGURATION = 2
_ORPHAN_GRACE_S = 10.0
_THREADS_S = 2.0
_MAX_FILES = 65_536

Ready = Callable[[int], None]


class StuckThreadError(Exception):
    """A thread does not come back. The process can only be left without waiting for it."""


class UnfinishedStartError(StuckThreadError):
    """It was told to stop amid its start, with which a thread goes on; nobody was served yet.

    It may be compiling, which cannot be broken off: the process ends well without it.
    """


class ProcessConfig(BaseModel):
    """Settings that every server process has. Roles inherit it and set ``role``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # Names the process in logs, traces, ``diptych <role>`` and ``DIPTYCH_<ROLE>_...``.
    role: ClassVar[str] = "process"

    listen: str = Field("127.0.0.1:0", description="host:port to serve gRPC on; port 0 picks one.")
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=LAST_PORT,
        description="Port of the Prometheus endpoint on the same host; 0 picks one, unset is off.",
    )
    health_port: int | None = Field(
        None,
        ge=0,
        le=LAST_PORT,
        description="Port of the health service alone, without TLS, on the same host, for probes "
        "that speak none; 0 picks one, unset is off.",
    )
    port_file: Path | None = Field(
        None, description="Write the addresses here as JSON once connections are accepted."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least level that is logged."
    )
    otlp_endpoint: Annotated[str, AfterValidator(check_endpoint)] | None = Field(
        None,
        description="OTLP/gRPC collector for traces, http://host:4317; unset: what the standard "
        "OTEL_EXPORTER_OTLP_ENDPOINT says, else off. No user and password in it: headers, such as "
        "OTEL_EXPORTER_OTLP_HEADERS, are where secrets belong.",
    )
    trace_sample_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of requests traced when the caller did not decide; of workers the "
        "caller is the router.",
    )
    stop_with_stdin: bool = Field(
        False, description="Stop when standard input ends, so as not to outlive the parent."
    )
    timers: Timers = Field(Timers(), description="Liveness and patience, s.")
    tls: TlsFiles = TlsFiles()


P_contra = TypeVar("P_contra", bound=ProcessConfig, contravariant=True)
P = TypeVar("P", bound=ProcessConfig)
E = TypeVar("E", bound=Exception)


class Serve(Protocol[P_contra]):
    """A role: serves until ``stop`` is set, then drains and returns.

    It calls ``ready(port)`` once it accepts connections.
    """

    async def __call__(self, config: P_contra, stop: asyncio.Event, ready: Ready, /) -> None: ...


def main(config_type: type[P], serve: Serve[P], args: Sequence[str] | None = None) -> int:
    """Load the settings and run ``serve``; the process's exit code."""
    # The interpreter collects garbage as it ends: half a second over torch's objects alone.
    atexit.register(gc.freeze)
    role = config_type.role
    try:
        config = settings.load(
            config_type,
            args,
            prog=f"diptych {role}",
            env_prefix=f"DIPTYCH_{role.upper().replace('-', '_')}_",
        )
    except ConfigurationError as error:
        return complain(role, error)
    return run(serve, config)


def run(serve: Serve[P], config: P) -> int:
    """Run ``serve`` on uvloop until SIGTERM or SIGINT; the process's exit code.

    0 after a clean stop, 2 after one line when a setting or file is wrong, 1
    after a logged traceback for a bug. The first signal sets ``stop``; a second
    one exits at once. After a StuckThreadError it does not return but ends the process, with
    1 unless a setting is wrong (0 if it was an UnfinishedStartError alone), and so it does where
    what ``serve`` gave to ``asyncio.to_thread`` goes on two seconds after it: the interpreter
    would wait for the thread.
    """
    logs.set_up(f"diptych-{config.role}", config.log_level)
    _take_files()
    failure: Exception | BaseExceptionGroup | None = None
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        threads = loop_threads()
        runner.get_loop().set_default_executor(threads)
        try:
            runner.run(_run(serve, config))
        except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001 - told below
            failure = error
        at = runner.run(stuck_at(threads, _THREADS_S))
        if at is not None:  # to leave the block would be to wait for it
            logger.critical("ended without a thread that is stuck", extra={"at": at})
            _leave(_told(failure, config.role) or EXIT_FAILED)
    code = _told(failure, config.role)
    if failure is not None and _first_of(StuckThreadError, failure) is not None:
        _leave(code)
    return code


def _take_files() -> None:
    """May have many open, where the system lets it: shells say 1,024 for the sake of old ones."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if most == resource.RLIM_INFINITY else min(_MAX_FILES, most)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _told(failure: Exception | BaseExceptionGroup | None, role: str) -> int:
    """Tell why ``serve`` failed; the exit code."""
    if failure is None:
        return 0
    wrong = _first_of(ConfigurationError, failure)
    if wrong is not None:
        return complain(role, wrong)
    if _is_only(UnfinishedStartError, failure):
        why = str(_first_of(UnfinishedStartError, failure))
        logger.warning("ended amid its start", extra={"why": why})
        return 0
    logger.critical("process failed", exc_info=failure)
    return EXIT_FAILED


def settle() -> None:
    """Collect garbage once, and never look again at what is left: it is there to stay.

    A role calls it when all that it serves with is there, before it takes requests. Modules
    and what they built are hundreds of thousands of objects: each full collection over them
    stopped every stream for 0.1 to 0.2 s.
    """
    begin_s = time.monotonic()
    gc.collect()
    gc.freeze()
    took_s = time.monotonic() - begin_s
    extra = {"num_objects": gc.get_freeze_count(), "collected_in_s": round(took_s, 3)}
    logger.info("settled", extra=extra)


def complain(role: str, error: ConfigurationError) -> int:
    """Tell the one line for a wrong setting, after what was logged; the exit code."""
    line = f"diptych {role}: {error.message}"
    if not logs.say(line):
        print(line, file=sys.stderr)  # noqa: T201 - for people
    return EXIT_CONFIGURATION


async def _run(serve: Serve[P], config: P) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    was_signalled = False  # the end of standard input may have set ``stop`` before

    def on_signal(signum: signal.Signals) -> None:
        nonlocal was_signalled
        if was_signalled:
            _leave(128 + signum)
        was_signalled = True
        logger.info("stopping", extra={"signal": signum.name})
        stop.set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, on_signal, signum)
    if config.stop_with_stdin:
        watch = threading.Thread(
            target=_stop_at_eof, args=(loop, stop), name="stdin-watch", daemon=True
        )
        watch.start()
    await serve(config, stop, lambda port: logger.info("listening", extra={"port": port}))


def _stop_at_eof(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    while os.read(0, 4096):
        pass
    try:
        loop.call_soon_threadsafe(stop.set)
    except RuntimeError:  # the loop is closed: we are exiting anyway
        return
    time.sleep(_ORPHAN_GRACE_S)
    _leave(EXIT_FAILED)


def _leave(code: int) -> NoReturn:
    """End the process without waiting for its threads; the log gets its moment."""
    logs.flush()
    os._exit(code)


def _first_of(kind: type[E], error: BaseException) -> E | None:
    """The first error of that kind: this one, or in a group, however deep."""
    if isinstance(error, kind):
        return error
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            found = _first_of(kind, each)
            if found is not None:
                return found
    return None


def _is_only(kind: type[Exception], error: BaseException) -> bool:
    """Whether it is of that kind, and so are all in it if it is a group."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(kind)[1] is None
    return isinstance(error, kind)

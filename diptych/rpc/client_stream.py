"""The client's side of one long stream: its commands, reading it, giving it up, opening it again.

Knows neither what a command means nor what an event says. Its peers are workers;
everything here belongs to the event loop.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import Generic, NoReturn, Protocol, TypeVar

import grpc

from diptych.cancellation import is_told_to_end
from diptych.errors import DiptychError, NoWorkerError
from diptych.rpc.call_end import CallEnd, Ending
from diptych.rpc.liveness import Liveness
from diptych.rpc.status import from_rpc_error
from diptych.timers import Timers
from diptych.v1 import common_pb2

Command = TypeVar("Command")
Event = TypeVar("Event")
Event_co = TypeVar("Event_co", covariant=True)

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 1.0


class Call(AsyncIterable[Event_co], Ending, Protocol[Event_co]):
    """What is used of a gRPC call whose responses are a stream."""

    def cancel(self) -> bool:
        """End it at once; a reader of it gets a CancelledError."""
        ...


class CommandQueue(Generic[Command]):
    """What one stream still has to send, and the heartbeats in between.

    ``put`` never waits; ``problem`` tells when the peer takes nothing. One per stream, so
    that a stream that ended can take nothing from the next one. Its ``commands`` are the
    stream's request iterator.
    """

    def __init__(
        self, timers: Timers, heartbeat: Callable[[], Command], *, max_unsent: int
    ) -> None:
        self._timers = timers
        self._heartbeat = heartbeat
        self._max_unsent = max_unsent
        self._loop = asyncio.get_running_loop()
        self._commands: deque[Command] = deque()
        self._wake = asyncio.Event()
        self._ended = False
        self._moved_at_s = self._loop.time()

    def put(self, command: Command) -> None:
        """Send after everything that was put before; nothing once ended."""
        if self._ended:
            return
        if not self._commands:
            self._moved_at_s = self._loop.time()
        self._commands.append(command)
        self._wake.set()

    def end(self) -> None:
        """Half-close the stream at once; what is unsent is dropped."""
        self._ended = True
        self._commands.clear()
        self._wake.set()

    async def commands(self) -> AsyncIterator[Command]:
        """The stream's requests: what was put, and a heartbeat each period."""
        heartbeat_at_s = self._loop.time() + self._timers.heartbeat_s
        while not self._ended:
            if self._loop.time() >= heartbeat_at_s:
                heartbeat_at_s = self._loop.time() + self._timers.heartbeat_s
                yield self._heartbeat()
                continue  # it may have ended meanwhile
            if self._commands:
                self._moved_at_s = self._loop.time()
                yield self._commands.popleft()
                continue
            self._wake.clear()
            try:
                async with asyncio.timeout_at(heartbeat_at_s):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def problem(self) -> str | None:
        """Why the stream is to be given up; None while it moves."""
        if len(self._commands) > self._max_unsent:
            return f"{len(self._commands)} commands are unsent"
        stuck_s = self._loop.time() - self._moved_at_s
        if self._commands and stuck_s > self._timers.unsent_s:
            return f"commands are unsent for {stuck_s:.1f} s"
        return None


def _never_stuck() -> None:
    """Stands for the check of a stream that sends nothing."""


class ClientStream(Generic[Event]):
    """One call, read once by one task until either side ends it or its peer is lost.

    ``progress`` takes from a message how the peer's engine stands, None where it does
    not say. ``stuck`` tells why the stream is to be given up although its peer is alive.
    """

    def __init__(
        self,
        call: Call[Event],
        timers: Timers,
        *,
        progress: Callable[[Event], common_pb2.EngineProgress | None],
        stuck: Callable[[], str | None] = _never_stuck,
    ) -> None:
        self._call = call
        self._end = CallEnd(call)
        self._progress = progress
        self._stuck = stuck
        self._loop = asyncio.get_running_loop()
        self._liveness = Liveness(timers, self._loop.time())
        self._lost: str | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, on_event: Callable[[Event], DiptychError | None]) -> DiptychError:
        """Read to the end and return why it came; no call is left open in any case.

        ``on_event`` is called for every message, in order; an error that it returns ends
        the stream, as does a message that does not parse. Cancelling the task is no end of
        this kind: it is raised.
        """
        self._watch()
        try:
            async for event in self._call:
                if event is None:  # gRPC's word for a message that does not parse
                    return NoWorkerError("a message of it cannot be read")
                self._liveness.heard(self._progress(event))
                error = on_event(event)
                if error is not None:
                    return error
            return NoWorkerError("it ended the stream")
        except grpc.aio.AioRpcError as error:
            said = await self._end.error(error)
            return NoWorkerError("it ended the stream") if said is None else from_rpc_error(said)
        except asyncio.CancelledError:  # of the call, or of this task
            if is_told_to_end():
                raise
            return NoWorkerError(self._lost or "the stream was cancelled")
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._call.cancel()

    def _watch(self) -> None:
        """Check again at a moment at which all streams of the process are checked, so that it
        wakes up once for them.
        """
        period_s = self._liveness.check_every_s
        num_periods = round(self._loop.time() / period_s) + 1  # timers may be early
        self._timer = self._loop.call_at(num_periods * period_s, self._check)

    def _check(self) -> None:
        self._lost = self._liveness.problem(self._loop.time()) or self._stuck()
        if self._lost is None:
            self._watch()
        else:
            self._call.cancel()


async def keep_open(hold: Callable[[], Awaitable[bool]]) -> NoReturn:
    """Open a stream again whenever it ended, until cancelled.

    ``hold`` runs one stream to its end and tells whether it was ever up. The pause
    before the next one is short after one that was, else it doubles up to a second.
    """
    pause_s = _FIRST_PAUSE_S
    while True:
        if await hold():
            pause_s = _FIRST_PAUSE_S
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

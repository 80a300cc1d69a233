"""The server's side of one long bidirectional stream: read, write, heartbeats, the last word.

Knows neither what a command means nor what an event says. It is written with
``context.write`` rather than ``yield``, because its task group must not be open
across a yield of the handler.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

import grpc
from google.protobuf.message import Message

from diptych.errors import DiptychError, InvalidRequestError, RouterLostError, SlowClientError
from diptych.rpc.server import Context
from diptych.timers import Timers

Command = TypeVar("Command", bound=Message)


class _HalfClosedError(Exception):
    """The router has nothing more to say."""


class _CallOverError(Exception):
    """The router is gone: nothing can be written any more."""


class ServerStream(Generic[Command]):
    """One stream, run once by its handler's task; everything else on the same loop.

    ``take`` gives the next message to send, None when there is none; whoever adds
    one calls :meth:`wake`. ``beat`` is called each ``timers.heartbeat_s`` and adds a
    heartbeat. A stream whose router was silent for ``timers.lost_peer_s``, or that
    could not send for ``timers.unsent_s``, ends with an error. However it ends but by a
    cancel, a message on its way out has a quarter of ``timers.heartbeat_s`` to leave.
    """

    def __init__(
        self,
        commands: AsyncIterator[Command],
        context: Context,
        *,
        timers: Timers,
        take: Callable[[], Message | None],
        beat: Callable[[], None],
    ) -> None:
        self._commands = commands
        self._context = context
        self._timers = timers
        self._take = take
        self._beat = beat
        self._unsent = asyncio.Event()
        self._ending: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._heard_at = time.monotonic()
        self.tasks: asyncio.TaskGroup | None = None  # of the stream, while it runs
        self.writing = False  # a message is on its way out, or was broken off there

    def wake(self) -> None:
        """There is something to send."""
        self._unsent.set()

    def end(self, error: DiptychError) -> None:
        """End the stream with ``error``, soon. The first error counts."""
        if not self._ending.done():
            self._ending.set_exception(error)

    async def run(self, on_command: Callable[[Command], None]) -> None:
        """Serve until the router half-closes the stream (returns) or cancels it.

        ``on_command`` is called for every command, in order. Raises the DiptychError
        that ended the stream; leaves no task behind in any case.
        """
        self._heard_at = time.monotonic()
        try:
            async with asyncio.TaskGroup() as self.tasks:
                self.tasks.create_task(self._read(on_command), name="stream-read")
                writer = self.tasks.create_task(self._write(), name="stream-write")
                self.tasks.create_task(self._keep_alive(), name="stream-heartbeat")
                try:
                    await self._ending
                except DiptychError:
                    await self._let_out(writer)
                    raise
                await self._let_out(writer)
                raise _HalfClosedError
        except BaseExceptionGroup as group:
            group.__traceback__ = None  # see below
            error = _cause(group)
            try:
                if isinstance(error, _CallOverError):  # gRPC is about to cancel the handler
                    raise asyncio.CancelledError from None
                if not isinstance(error, _HalfClosedError):
                    raise error from None
            finally:
                del error
        finally:
            if not self._ending.cancel() and not self._ending.cancelled():
                self._ending.exception()  # marks it as retrieved
            # No reference cycle may keep the call: gRPC's memory of it is larger than Python
            # can see, so its collector would let many calls pile up.
            self._take, self._beat = _nothing, _nothing

    async def tell(self, last: Message) -> None:
        """Send why the stream ends, once ``run`` has raised it, and let the router leave."""
        if not self.writing:
            await last_word(self._context, last, self._timers.lost_peer_s)

    async def _read(self, on_command: Callable[[Command], None]) -> None:
        async for command in self._commands:
            self._heard_at = time.monotonic()
            try:
                if not isinstance(command, Message):
                    raise InvalidRequestError("not valid protobuf", field="command")
                on_command(command)
            except DiptychError as error:
                self.end(error)
                return
        if not self._ending.done():
            self._ending.set_result(None)

    async def _let_out(self, writer: "asyncio.Task[None]") -> None:
        """Wait a moment for the message that is on its way out.

        One that is broken off there leaves no room for a last word, nor for the status.
        """
        self.wake()
        await asyncio.wait({writer}, timeout=self._timers.heartbeat_s / 4)

    async def _write(self) -> None:
        while not self._ending.done():
            message = self._take()
            if message is None:
                self._unsent.clear()
                await self._unsent.wait()
                continue
            self.writing = True
            try:
                async with asyncio.timeout(self._timers.unsent_s):
                    await self._context.write(message)
            except TimeoutError:
                raise SlowClientError(
                    f"nothing could be sent for {self._timers.unsent_s} s"
                ) from None
            except grpc.aio.BaseError:
                raise _CallOverError from None
            self.writing = False

    async def _keep_alive(self) -> None:
        interval_s = self._timers.heartbeat_s
        while True:
            due = time.monotonic() + interval_s
            await asyncio.sleep(interval_s)
            late_s = time.monotonic() - due
            self._heard_at += late_s  # we were held up: what the router sent may wait unread
            self._beat()
            self.wake()
            silent_s = time.monotonic() - self._heard_at
            if silent_s > self._timers.lost_peer_s:
                raise RouterLostError(f"no sign of the router for {silent_s:.1f} s")


async def last_word(context: Context, message: Message, within_s: float) -> None:
    """Send ``message``, why a stream is about to end, and wait for the peer to cancel it.

    The status that follows says the same, but gRPC loses a status that meets a message of
    the peer's on its way. Nothing may be on its way out. Returns after ``within_s`` at the
    latest; a cancel ends the handler itself before.
    """
    with contextlib.suppress(TimeoutError, grpc.aio.BaseError):
        async with asyncio.timeout(within_s):
            await context.write(message)
            await asyncio.Event().wait()


def _nothing() -> None:
    """Stands for what a stream that is over no longer calls."""


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error that says why: a bug before a DiptychError before the router's leaving."""
    leaves = (_cause(e) if isinstance(e, BaseExceptionGroup) else e for e in group.exceptions)
    return min(leaves, key=_rank)


def _rank(error: BaseException) -> int:
    if isinstance(error, _HalfClosedError | _CallOverError):
        return 2
    return 1 if isinstance(error, DiptychError) else 0

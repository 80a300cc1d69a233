"""One call of ModelStreamInfer: requests as they come, responses as they are there."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Final, Protocol

import grpc

from diptych.errors import RETRY_LATER_S, DiptychError, QueueFullError, SlowClientError
from diptych.open_inference import service_pb2
from diptych.rpc.server import Context
from router.frontend.open_inference.answers import failure

MOST_AT_ONCE: Final = 64
"""Requests of one stream that are answered at a time; a further one is not read yet."""

IDLE_S: Final = 600.0
"""A stream on which nothing is asked for so long ends, s."""

_LAST_WRITE_S: Final = 1.0  # at least, for a response on its way once its answer has failed


class Answering(Protocol):
    """One request of a stream, being answered."""

    @property
    def given_id(self) -> str:
        """What its client calls it; empty until that is known."""
        ...

    def responses(
        self, give_up: Callable[[], None]
    ) -> AsyncGenerator[service_pb2.ModelInferResponse, None]:
        """The answer; see :meth:`router.frontend.generator.Generator.generate`.

        Raises DiptychError.
        """
        ...


class InferStream:
    """Owns the writing half of a call. Used by its handler's task; it leaves no task behind.

    Invariant: one response is on its way at a time. A request that is refused or fails is told
    as a response, and the others go on; only a client that takes nothing ends them all.
    """

    def __init__(
        self,
        context: Context,
        begin: Callable[[bytes], Answering],
        *,
        write_s: float,
        ends_on_failure: bool = False,
    ) -> None:
        """``begin`` gets a request as it came. A client that does not take why one failed within
        ``write_s`` ends the call. With ``ends_on_failure`` any failure does, with its status.
        """
        self._context = context
        self._begin = begin
        self._write_s = write_s
        self._ends_on_failure = ends_on_failure
        self._places = asyncio.Semaphore(MOST_AT_ONCE)
        self._writing = asyncio.Lock()
        self._num_open = 0
        self._idle = asyncio.timeout(IDLE_S)
        self._idle_since_s: float | None = asyncio.get_running_loop().time()
        self._makes_room = False

    @property
    def idle_since_s(self) -> float | None:
        """See :class:`router.frontend.open_inference.open_streams.Stream`."""
        return self._idle_since_s

    def make_room(self) -> None:
        """End :meth:`run`, whatever may still come."""
        self._makes_room = True
        if not self._idle.expired():
            self._idle.reschedule(asyncio.get_running_loop().time())

    async def run(self, requests: AsyncIterator[bytes]) -> None:
        """Until the client has nothing more to ask and everything is answered.

        Raises DiptychError.
        """
        try:
            async with self._idle, asyncio.TaskGroup() as tasks:
                while True:
                    await self._places.acquire()
                    data = await anext(requests, None)
                    if data is None:
                        return
                    self._began()
                    tasks.create_task(self._answer(data), name="stream-infer")
        except TimeoutError:
            if self._makes_room:
                raise QueueFullError(
                    "another needs the place of a stream that asks nothing",
                    retry_after_s=RETRY_LATER_S,
                ) from None
            raise SlowClientError(f"nothing was asked for {IDLE_S:g} s") from None
        except BaseExceptionGroup as group:
            raise _first(group) from None

    def _began(self) -> None:
        self._num_open += 1
        self._idle_since_s = None
        if not self._makes_room:
            self._idle.reschedule(None)

    def _ended(self) -> None:
        self._num_open -= 1
        self._places.release()
        if self._num_open or self._makes_room or self._idle.expired():
            return
        self._idle_since_s = asyncio.get_running_loop().time()
        self._idle.reschedule(self._idle_since_s + IDLE_S)

    async def _answer(self, data: bytes) -> None:
        answering = self._begin(data)
        try:
            await self._write_all(answering)
        except _ClientStuckError as error:
            raise error.cause from None
        except DiptychError as error:
            if self._ends_on_failure:
                raise
            await self._write_failure(failure(error, answering.given_id))
        finally:
            self._ended()

    async def _write_failure(self, response: service_pb2.ModelStreamInferResponse) -> None:
        async with self._writing:
            try:
                async with asyncio.timeout(self._write_s):
                    await self._send(response)
            except TimeoutError:
                raise SlowClientError(
                    f"the client did not take a response for {self._write_s:g} s"
                ) from None

    async def _write_all(self, answering: Answering) -> None:
        writes = _Writes(self._write_s)
        async with aclosing(answering.responses(writes.give_up)) as responses:
            try:
                async with writes.patience:
                    async for response in responses:
                        async with self._writing:
                            writes.begin()
                            await self._send(
                                service_pb2.ModelStreamInferResponse(infer_response=response)
                            )
                            writes.end()
            except TimeoutError:
                try:
                    async for _ in responses:
                        pass
                except DiptychError as error:
                    if writes.is_cut:
                        raise _ClientStuckError(error) from None
                    raise

    async def _send(self, response: service_pb2.ModelStreamInferResponse) -> None:
        """Only for who holds ``_writing``."""
        try:
            await self._context.write(response)
        except grpc.aio.BaseError:  # the call is over: gRPC is about to cancel the handler
            raise asyncio.CancelledError from None


class _Writes:
    """The writes of one answer, and how they end if it fails. Used by its task alone.

    A response that waits for its turn is dropped then, for it says nothing of the client that
    it has to wait. One on its way has as long as any other.
    """

    def __init__(self, write_s: float) -> None:
        self._write_s = write_s
        self._loop = asyncio.get_running_loop()
        self._began_s: float | None = None
        self._is_dropped = False
        self.patience = asyncio.timeout(None)
        """Over all of them."""

    @property
    def is_cut(self) -> bool:
        """Whether one was begun that did not end."""
        return self._began_s is not None

    def begin(self) -> None:
        """It is this answer's turn. Raises TimeoutError: it is given up."""
        if self._is_dropped:
            raise TimeoutError
        self._began_s = self._loop.time()

    def end(self) -> None:
        """The response was taken."""
        self._began_s = None

    def give_up(self) -> None:
        """The answer has failed while a response was not taken."""
        if self.patience.expired():
            return
        now_s = self._loop.time()
        if self._began_s is None:
            self._is_dropped = True
            self.patience.reschedule(now_s)
        else:
            ends_s = max(self._began_s + self._write_s, now_s + _LAST_WRITE_S)
            self.patience.reschedule(ends_s)


class _ClientStuckError(Exception):
    """A response that was broken off leaves no room for another."""

    def __init__(self, cause: DiptychError) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error in it, however deep."""
    found = group.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found

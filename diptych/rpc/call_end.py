"""How a call whose requests are a stream ended: as its peer said, whatever became of our writes.

gRPC for asyncio puts an INTERNAL of its own in place of the peer's status where one of our
writes fails because the call has just ended (grpc/grpc#36066). Why the peer ended it would be
lost: a certificate that is of another role would read as an error of the library.
"""

import asyncio
import weakref
from collections.abc import Callable, Coroutine
from typing import Protocol, TypeVar

import grpc

_OWN_WORDS = "Internal error from Core"
_STATUS_PATIENCE_S = 1.0  # the peer's status is on its way then; without one there is no more

T = TypeVar("T")


class Ending(Protocol):
    """What is used of a call: it tells each status that it gets, at once."""

    def add_done_callback(self, callback: Callable[["grpc.aio.Call"], None]) -> None: ...


class CallEnd:
    """The status that the peer gave one call. Made with the call; event loop only."""

    def __init__(self, call: Ending) -> None:
        self._error: grpc.aio.AioRpcError | None = None  # None: it ended well, or has not yet
        self._is_told = asyncio.Event()
        # A call keeps its callbacks, with itself: by a proxy, for no cycle may keep the call.
        type(call).add_done_callback(weakref.proxy(call), self._on_status)

    async def error(self, seen: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError | None:
        """What the peer ended the call with that raised ``seen``; None: it ended it well."""
        if not _is_own(seen.code(), seen.details()):
            return seen
        try:
            async with asyncio.timeout(_STATUS_PATIENCE_S):
                await self._is_told.wait()
        except TimeoutError:
            return seen
        return self._error

    def _on_status(self, call: "grpc.aio.Call") -> None:
        """Called for each status, before there can be the next one."""
        try:
            code, details = _known(call.code()), _known(call.details())
            if _is_own(code, details):
                return
            if code is not grpc.StatusCode.OK:
                self._error = grpc.aio.AioRpcError(
                    code,
                    _known(call.initial_metadata()),
                    _known(call.trailing_metadata()),
                    details,
                    None,
                )
        except ReferenceError:  # nobody has the call any more
            return
        self._is_told.set()


def _is_own(code: grpc.StatusCode, details: str | None) -> bool:
    return code is grpc.StatusCode.INTERNAL and details == _OWN_WORDS


def _known(value: Coroutine[object, None, T]) -> T:
    """What is there already: gRPC has coroutines for all that a call may still have to wait for."""
    try:
        value.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    value.close()
    raise AssertionError("a call that is done waits for nothing")

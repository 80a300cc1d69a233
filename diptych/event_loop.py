"""uvloop's event loop, in a turn of which all is taken that gRPC has for it.

A thread of gRPC's writes a byte to a socket for each thing that has happened, and in each turn the
loop reads one of them. With 278 unread (Linux) the socket is full, and the thread waits. So where
turns are long, as many clients ask over HTTP, gRPC got one thing done in each: streams to workers
stood still for seconds, and were lost (grpcio 1.85).
"""

import socket
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVarTuple

import uvloop

_WAKER: Final = "PollerCompletionQueue"  # gRPC's, whose method the loop calls to read a byte
_MOST_BYTES: Final = 512
_PEEK: Final = socket.MSG_PEEK | socket.MSG_DONTWAIT

Ts = TypeVarTuple("Ts")


class EventLoop(uvloop.Loop):
    """Of a server process. What gRPC gives it to watch it reads empty, but for the last byte."""

    def add_reader(self, fd: Any, callback: Callable[[*Ts], Any], *args: *Ts) -> None:
        """See asyncio."""
        read = _Waker(fd, callback, self.time) if _is_waker(callback) else callback
        super().add_reader(fd, read, *args)


def _is_waker(callback: Callable[..., Any]) -> bool:
    method = callback.func if isinstance(callback, partial) else callback
    return type(getattr(method, "__self__", None)).__name__ == _WAKER


class _Waker:
    """Called where there is a byte. Once in a millisecond, as the loop tells it, it reads more."""

    __slots__ = ("_clock", "_read", "_read_s", "_woken")

    def __init__(
        self, woken: socket.socket, read: Callable[..., Any], clock: Callable[[], float]
    ) -> None:
        """``read`` is gRPC's: it reads a byte, then takes all that has happened."""
        self._woken = woken
        self._read = read
        self._clock = clock
        self._read_s = 0.0  # when more was last read

    def __call__(self, *args: object) -> None:
        now_s = self._clock()
        if now_s != self._read_s:
            self._read_s = now_s
            try:  # bytes first: what has happened by then is taken
                num_bytes = len(self._woken.recv(_MOST_BYTES, _PEEK))
                if num_bytes > 1:
                    self._woken.recv(num_bytes - 1, socket.MSG_DONTWAIT)
            except BlockingIOError:  # another loop of this process was faster
                return
        self._read(*args)

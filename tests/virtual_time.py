"""An event loop whose clock jumps to the next timer as soon as nothing else is to be done."""

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


class _Skipping(selectors.SelectSelector):
    """Waits for no file: all there is happens in this process."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everybody waits, and nobody for a timer"
        self.now += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Nothing in it may wait for another thread or process."""

    def __init__(self) -> None:
        self._skipping = _Skipping()
        super().__init__(self._skipping)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._skipping.now


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` to its end; meanwhile ``time.monotonic`` is the loop's clock."""
    loop = VirtualLoop()
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner(loop_factory=lambda: loop) as runner:
        patch.setattr(time, "monotonic", loop.time)
        return runner.run(main)

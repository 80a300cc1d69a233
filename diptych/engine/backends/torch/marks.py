"""Moments in what a device of torch's was asked for. Model thread."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from diptych.errors import DeviceLostError


class HostMark:
    """Everything was done when it was asked for. Implements ``Mark``."""

    def wait(self) -> None:
        """It is."""

    def beside(self) -> AbstractContextManager[None]:
        return nullcontext()


class EventMark:
    """Of the current stream of an NVIDIA device. Implements ``Mark``."""

    def __init__(self, device: torch.device, side: torch.cuda.Stream) -> None:
        """side: for what is asked beside; nobody else's meanwhile."""
        self._side = side
        # Blocking: the thread that waits sleeps, and its core is others'.
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        try:
            self._event.synchronize()
        except RuntimeError as error:
            raise DeviceLostError(f"the device is lost: {error}") from error

    @contextmanager
    def beside(self) -> Iterator[None]:
        self._side.wait_event(self._event)
        try:
            with torch.cuda.stream(self._side):
                yield
        finally:
            self._finish()

    def _finish(self) -> None:
        try:
            self._side.synchronize()
        except RuntimeError as error:
            raise DeviceLostError(f"the device is lost: {error}") from error

"""From the setting ``--device`` to a backend. Called once per worker, at start."""

from collections.abc import Callable, Mapping

from diptych.engine.backends.base import Backend
from diptych.engine.backends.cpu.backend import CpuBackend
from diptych.formats import DeviceName

BACKENDS: Mapping[DeviceName, Callable[[], Backend]] = {"cpu": CpuBackend}


def make_backend(device: DeviceName) -> Backend:
    """The backend of a device; the settings refuse any other name."""
    return BACKENDS[device]()

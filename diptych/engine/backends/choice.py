"""From the setting ``--device`` to a backend. Called once per worker, at start."""

from collections.abc import Callable, Mapping

from diptych.engine.backends.base import Backend
from diptych.engine.backends.cpu.backend import CpuBackend
from diptych.errors import ConfigurationError

_BACKENDS: Mapping[str, Callable[[], Backend]] = {"cpu": CpuBackend}


def make_backend(device: str) -> Backend:
    """The backend of a device.

    Raises:
        ConfigurationError: there is none.
    """
    make = _BACKENDS.get(device)
    if make is None:
        raise ConfigurationError(f"device {device!r} is not one of {', '.join(_BACKENDS)}")
    return make()

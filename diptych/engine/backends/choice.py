"""From the setting ``--device`` to a backend. Called once per worker, at start."""

import importlib
import logging
from collections.abc import Callable, Mapping

import torch

from diptych.engine.backends.base import Backend
from diptych.engine.backends.cpu.backend import CpuBackend
from diptych.errors import ConfigurationError
from diptych.formats import DeviceName

logger = logging.getLogger(__name__)

_MIN_CAPABILITY = (8, 0)  # the first with bfloat16 products, and what kernels are compiled for


def make_backend(device: DeviceName) -> Backend:
    """The backend of a device; the settings refuse any other name.

    Raises:
        ConfigurationError: this machine or installation lacks what the device needs.
    """
    return BACKENDS[device]()


def _auto() -> Backend:
    missing = _missing_for_cuda()
    reason = "a GPU and triton are there" if missing is None else missing
    name: DeviceName = "cuda" if missing is None else "cpu"
    logger.info("device chosen", extra={"device": name, "reason": reason})
    return BACKENDS[name]()


def _cuda() -> Backend:
    missing = _missing_for_cuda()
    if missing is not None:
        raise ConfigurationError(f"device cuda: {missing}; or set device to cpu")
    from diptych.engine.backends.cuda.backend import CudaBackend
    from diptych.engine.backends.cuda.graphs import CudaGraphs

    return CudaBackend(torch.device("cuda", torch.cuda.current_device()), CudaGraphs())


def _missing_for_cuda() -> str | None:
    """What is, and how to get it; None: nothing is."""
    if torch.version.cuda is None:
        return "this torch was built without CUDA: install one that was built with it"
    if not torch.cuda.is_available():
        return "torch sees no GPU: it needs one by NVIDIA and its driver"
    capability = torch.cuda.get_device_capability()
    if capability < _MIN_CAPABILITY:
        return f"the GPU's compute capability is {capability}: it needs {_MIN_CAPABILITY} or later"
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"triton cannot be imported ({error}): install diptych[cuda]"
    return None


BACKENDS: Mapping[DeviceName, Callable[[], Backend]] = {
    "auto": _auto,
    "cpu": CpuBackend,
    "cuda": _cuda,
}

"""From the setting ``--device`` to a backend. Called once per worker, at start."""

import importlib
import logging
from collections.abc import Callable, Mapping
from types import ModuleType

import torch

from diptych.engine.backends.base import Backend
from diptych.engine.backends.cpu.backend import CpuBackend
from diptych.engine.model.rank_share import WHOLE, RankShare
from diptych.errors import ConfigurationError
from diptych.formats import DeviceName, PrefillAttentionName

logger = logging.getLogger(__name__)

_MIN_CAPABILITY = (8, 0)  # the first with bfloat16 products, and what kernels are compiled for


def make_backend(
    device: DeviceName,
    share: RankShare = WHOLE,
    prefill_attention: PrefillAttentionName = "own",
) -> Backend:
    """The backend of a device; the settings refuse any other name.

    share: of several ranks each has a GPU of its own, in their order.

    Raises:
        ConfigurationError: this machine or installation lacks what the device needs.
    """
    return BACKENDS[device](share, prefill_attention)


def _auto(share: RankShare, prefill_attention: PrefillAttentionName) -> Backend:
    missing = _missing_for_cuda()
    reason = "a GPU and triton are there" if missing is None else missing
    name: DeviceName = "cuda" if missing is None else "cpu"
    logger.info("device chosen", extra={"device": name, "reason": reason})
    return BACKENDS[name](share, prefill_attention)


def _cpu(share: RankShare, prefill_attention: PrefillAttentionName) -> Backend:
    if prefill_attention != "own":
        raise ConfigurationError(
            f"prefill_attention {prefill_attention} needs device cuda (got cpu)"
        )
    return CpuBackend()


def _cuda(share: RankShare, prefill_attention: PrefillAttentionName) -> Backend:
    missing = _missing_for_cuda()
    if missing is not None:
        raise ConfigurationError(f"device cuda: {missing}; or set device to cpu")
    first = torch.cuda.current_device()
    if share.size > 1:
        count = torch.cuda.device_count() - first
        if count < share.size:
            raise ConfigurationError(
                f"tensor_parallel: {share.size} ranks need a GPU each, but {count} can be seen: "
                f"set --tensor-parallel to {count} at the most, or CUDA_VISIBLE_DEVICES to more"
            )
    if share.rank:
        torch.cuda.set_device(first + share.rank)
    from diptych.engine.backends.cuda.backend import CudaBackend
    from diptych.engine.backends.cuda.graphs import CudaGraphs

    flashinfer = _flashinfer() if prefill_attention == "flashinfer" else None
    device = torch.device("cuda", first + share.rank)
    return CudaBackend(device, CudaGraphs(), flashinfer=flashinfer)


def _flashinfer() -> ModuleType:
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        raise ConfigurationError(
            f"prefill_attention flashinfer cannot be imported ({error}): "
            "pip install -e '.[flashinfer]' (in Diptych's clone)"
        ) from None


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
        advice = "pip install -e '.[cuda]' (in Diptych's clone)"
        return f"triton cannot be imported ({error}): {advice}"
    return None


BACKENDS: Mapping[DeviceName, Callable[[RankShare, PrefillAttentionName], Backend]] = {
    "auto": _auto,
    "cpu": _cpu,
    "cuda": _cuda,
}

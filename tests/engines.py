"""Engines of the CPU's backend, and of the plain one that it is compared with."""

from pathlib import Path

import torch

from diptych.engine.backends.base import Backend
from diptych.engine.backends.cpu.backend import CpuBackend
from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.decoder import Decoder
from diptych.engine.model.weights import load_weights
from diptych.formats import Quantization

CPU = CpuBackend()
PLAIN = TorchBackend(torch.device("cpu"))


class AheadBackend(TorchBackend):
    """Draws by itself, as a device does that has two steps at a time."""

    steps_in_flight = 2

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))


def load_decoder(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    quantization: Quantization = "none",
    backend: Backend = CPU,
) -> Decoder:
    """The model of a folder."""
    config = ModelConfig.from_folder(folder)
    weights = load_weights(folder, config, backend.weights(dtype, quantization))
    return Decoder(config, weights, backend.layer_ops(config, weights.dtype))

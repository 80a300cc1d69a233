"""Weights from a safetensors folder. Signatures first."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from diptych.engine.model_config import ModelConfig

LoadProgress = Callable[[float], None]  # done ratio, 0 to 1


class TensorLocation(NamedTuple):
    path: Path
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    offset: int  # in the file
    num_bytes: int


class DecoderWeights:
    """Everything a Decoder needs, packed."""


def tensor_index(folder: Path) -> dict[str, TensorLocation]:
    raise NotImplementedError


def load_weights(
    folder: Path | str,
    config: ModelConfig,
    dtype: torch.dtype = torch.float32,
    progress: LoadProgress = lambda ratio: None,
) -> DecoderWeights:
    raise NotImplementedError

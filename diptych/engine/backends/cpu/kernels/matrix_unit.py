"""The processor's matrix unit (AMX): whether there is one, and its configuration."""

import ctypes
import platform
from functools import cache

import torch
from torch import Tensor

from diptych.engine.backends.cpu.kernels.processor import FEATURES

TILE_ROWS, TILE_ROW_BYTES = 16, 64

_NEEDED = {"+amx-tile", "+amx-bf16", "+avx512bw"}
# arch_prctl(2) of Linux on x86-64
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


@cache
def is_lent() -> bool:
    """Whether this machine has the unit, and the system lets this process use it."""
    if not FEATURES >= _NEEDED or platform.system() != "Linux":
        return False
    answer: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)
    return answer == 0


@cache
def tile_shapes() -> Tensor:
    """What ``ldtilecfg`` reads: eight tiles of TILE_ROWS rows of TILE_ROW_BYTES."""
    shapes = torch.zeros(64, dtype=torch.uint8)
    shapes[0] = 1  # the palette
    shapes[16:32:2] = TILE_ROW_BYTES
    shapes[48:56] = TILE_ROWS
    return shapes

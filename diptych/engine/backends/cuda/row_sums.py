"""One row by a weight, without a matrix unit: bound by the weight's bytes."""

from typing import NamedTuple

import triton
from torch import Tensor

from diptych.engine.backends.cuda.kernels import row_sums


class _Tiling(NamedTuple):
    """What a program does."""

    outputs: int
    inputs: int  # at a time
    num_tiles: int  # of inputs, that are fetched ahead
    num_warps: int


# In graphs on an H200 one row takes of floats 10 us by 4096 x 4096 where torch's product takes 13,
# by 1024 x 3072 4 where it takes 7, and by 28672 x 4096 as long.
_BYTES = _Tiling(4, 512, 4, 2)
_MANY_OUTPUTS, _FEW_OUTPUTS = _Tiling(8, 512, 3, 4), _Tiling(2, 1024, 3, 4)  # of floats
_FEW = 4096


def sum_row(
    x: Tensor,  # [1, num_inputs]; e4m3, if the numbers are
    x_scale: Tensor | None,  # [1, 1] float32
    numbers: Tensor,  # [num_outputs, num_inputs] e4m3, uint8, or floats as x
    offsets: Tensor | None,  # zeros less 128 times scales, as many as outputs; None: none
    scales: Tensor | None,  # float32, as many as outputs
    bias: Tensor | None,
    y: Tensor,  # [1, num_outputs]
) -> None:
    num_outputs, num_inputs = numbers.shape
    tiling = _BYTES
    if numbers.element_size() > 1:
        tiling = _FEW_OUTPUTS if num_outputs < _FEW else _MANY_OUTPUTS
    row_sums.sum_row[(triton.cdiv(num_outputs, tiling.outputs),)](
        x,
        x_scale,
        numbers,
        offsets,
        scales,
        bias,
        y,
        num_outputs,
        num_inputs,
        is_whole=num_inputs % tiling.inputs == 0,
        tile_outputs=tiling.outputs,
        tile_inputs=tiling.inputs,
        num_tiles=tiling.num_tiles,
        num_warps=tiling.num_warps,
    )

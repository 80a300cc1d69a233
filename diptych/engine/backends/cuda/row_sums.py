"""One row by a weight with a scale for each output: bound by the weight's bytes."""

import triton
from torch import Tensor

from diptych.engine.backends.cuda.kernels import row_sums

_OUTPUTS, _INPUTS = 4, 512  # of a program, at a time
_NUM_TILES, _NUM_WARPS = 4, 2


def sum_row(
    x: Tensor,  # [1, num_inputs]; e4m3, if the numbers are
    x_scale: Tensor | None,  # [1, 1] float32
    numbers: Tensor,  # [num_outputs, num_inputs] e4m3, or uint8
    offsets: Tensor | None,  # zeros less 128 times scales, as many as outputs; None: none
    scales: Tensor,  # float32, as many as outputs
    bias: Tensor | None,
    y: Tensor,  # [1, num_outputs]
) -> None:
    num_outputs, num_inputs = numbers.shape
    row_sums.sum_row[(triton.cdiv(num_outputs, _OUTPUTS),)](
        x,
        x_scale,
        numbers,
        offsets,
        scales,
        bias,
        y,
        num_outputs,
        num_inputs,
        is_whole=num_inputs % _INPUTS == 0,
        tile_outputs=_OUTPUTS,
        tile_inputs=_INPUTS,
        num_tiles=_NUM_TILES,
        num_warps=_NUM_WARPS,
    )

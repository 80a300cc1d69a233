"""How loops read rows of a weight: float32 as they are, or compact ones widened first.

For the form see :mod:`diptych.models.compact`. What is widened lies in memory of the
thread, which stays in its cache, and has the bits of the float32 weight; so a product has
the same bits on either form.
"""

from typing import Any

from numba import types
from numba.extending import intrinsic
from torch import Tensor

from diptych.engine.backends.cpu.kernels.processor import LANES
from diptych.engine.backends.cpu.kernels.vector_function import (
    FLOAT,
    I8,
    I64,
    INT8,
    VectorFunction,
    written,
)
from diptych.engine.model.compact import Weight
from diptych.models import compact

_FLOAT_BYTES = 4
# Said here again, so that other blocks make other sources of the kernels, and compiled ones
# that are kept are not taken for theirs.
BLOCK_SIZES, HEAD_BYTES = (16, 32), 8
assert (BLOCK_SIZES, HEAD_BYTES) == (compact.BLOCK_SIZES, compact.HEAD_BYTES)
_UNROLLED = 4  # blocks; no loop widens fewer rows at a time
AS_THEY_ARE = len(BLOCK_SIZES)  # the kind of rows that are float32


def row_words(weight: Weight) -> tuple[Tensor, int, int, int]:
    """What a loop needs to know of them: where, bytes and blocks of a row, which kind."""
    num_columns = weight.shape[1]
    if isinstance(weight, Tensor):
        return weight, num_columns * _FLOAT_BYTES, 0, AS_THEY_ARE
    kind, num_bytes = BLOCK_SIZES.index(weight.block_size), weight.memory.shape[1]
    return weight.memory, num_bytes, num_columns // weight.block_size, kind


def widened_bytes(weight: Weight, num_rows: int) -> int:
    """Memory that a thread needs to have so many rows of it in float32."""
    return 0 if isinstance(weight, Tensor) else num_rows * weight.shape[1] * _FLOAT_BYTES


def widened(f: VectorFunction, block: Any, block_size: int) -> list[Any]:
    """The floats that a block stands for, in vectors."""
    scale, offset = (f.splat(f.load(f.at(block, at), FLOAT)) for at in (0, _FLOAT_BYTES))
    places = (f.at(block, HEAD_BYTES + first) for first in range(0, block_size, LANES))
    return [f.fused(f.elements(INT8, place), scale, offset) for place in places]


def _write_widen(module: Any, block_size: int) -> Any:
    """(first block, how many, where to, what to fetch): float32, one behind the other.

    Fetches as many bytes as it reads.
    """
    f = VectorFunction(module, f"widen_{block_size}", 4)
    blocks, num_blocks, target, ahead = f.arguments
    block_bytes = HEAD_BYTES + block_size

    def step(index: Any) -> None:
        f.fetch(f.at(ahead, (index, block_bytes)), _UNROLLED * block_bytes)
        for number in range(_UNROLLED):
            block = f.at(blocks, (index, block_bytes), number * block_bytes)
            place = f.at(target, (index, block_size * _FLOAT_BYTES))
            for vector, value in enumerate(widened(f, block, block_size)):
                first = number * block_size + vector * LANES
                f.store(value, f.at(place, first * _FLOAT_BYTES))

    f.loop(num_blocks, _UNROLLED, step)
    return f.end()


widen: Any = written(_write_widen, *[(size,) for size in BLOCK_SIZES])


def _room_code(_typing: Any, _num_bytes: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        place = builder.alloca(I8, size=arguments[0])
        place.align = 64
        return builder.ptrtoint(place, I64)

    return types.int64(types.int64), generate


room: Any = intrinsic(_room_code)  # address of so many bytes, for as long as the function runs

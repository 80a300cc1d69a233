"""A layer's row-wise operations, each in one pass over its rows.

In float32 whatever the element type is; where a result is one of the operation's own steps in
a checkpoint's training (a norm before its sum), it is rounded to that type as it was there.
"""

import triton
import triton.language as tl

from diptych.engine.backends.cuda.kernels import fp8


@triton.jit  # type: ignore[untyped-decorator]
def norm(
    x: tl.tensor,  # [N, size]
    weight: tl.tensor,  # [size] float32
    out: tl.tensor,  # [N, size]
    numbers: tl.tensor,  # [N, num_columns] e4m3, out in 8-bit floats; None: it is not wanted so
    scales: tl.tensor,  # [N] float32, theirs; or None
    size: int,
    num_columns: int,
    eps: float,
    width: tl.constexpr,  # the power of two that holds a row
) -> None:
    """Launched over (rows)."""
    places = tl.program_id(0).to(tl.int64) * size + tl.arange(0, width)
    is_element = tl.arange(0, width) < size
    row = tl.load(x + places, mask=is_element, other=0.0).to(tl.float32)
    normed = _normed(row, weight, size, eps, width).to(out.dtype.element_ty)
    tl.store(out + places, normed, mask=is_element)
    if numbers is not None:
        number = tl.program_id(0).to(tl.int64)
        fp8.store_rounded(normed.to(tl.float32), numbers, scales, number, num_columns, width)


@triton.jit  # type: ignore[untyped-decorator]
def add_norm(
    x: tl.tensor,  # [N, size]
    y: tl.tensor,  # [N, size]
    y_weight: tl.tensor,  # [size] float32, or None
    weight: tl.tensor,
    out: tl.tensor,  # [N, size]; y itself, or other memory
    numbers: tl.tensor,  # [N, num_columns] e4m3, or None
    scales: tl.tensor,  # [N] float32, or None
    size: int,
    num_columns: int,
    eps: float,
    width: tl.constexpr,  # the power of two that holds a row
) -> None:
    """x += y, normed where it has a weight; out = norm(x). Launched over (rows)."""
    places = tl.program_id(0).to(tl.int64) * size + tl.arange(0, width)
    is_element = tl.arange(0, width) < size
    added = tl.load(y + places, mask=is_element, other=0.0)
    if y_weight is not None:
        added = _normed(added.to(tl.float32), y_weight, size, eps, width).to(added.dtype)
    row = tl.load(x + places, mask=is_element, other=0.0)
    row = (row.to(tl.float32) + added.to(tl.float32)).to(row.dtype)
    tl.store(x + places, row, mask=is_element)
    if weight is not None:
        normed = _normed(row.to(tl.float32), weight, size, eps, width).to(out.dtype.element_ty)
        tl.store(out + places, normed, mask=is_element)
        if numbers is not None:
            number = tl.program_id(0).to(tl.int64)
            fp8.store_rounded(normed.to(tl.float32), numbers, scales, number, num_columns, width)


@triton.jit  # type: ignore[untyped-decorator]
def gate(
    gate_up: tl.tensor,  # [N, 2 * size]
    out: tl.tensor,  # [N, size]
    size: int,
    is_gelu: tl.constexpr,  # of tanh; else SiLU
    width: tl.constexpr,
) -> None:
    """Launched over (rows, spans of a row)."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * width + tl.arange(0, width)
    is_element = places < size
    gates = gate_up + row * 2 * size + places
    x = tl.load(gates, mask=is_element, other=0.0).to(tl.float32)
    up = tl.load(gates + size, mask=is_element, other=0.0).to(tl.float32)
    # (1 + tanh(z)) / 2 is the sigmoid of 2z.
    inner = 1.5957691216057308 * (x + 0.044715 * x * x * x) if is_gelu else x
    result = x / (1.0 + tl.exp(-inner)) * up
    tl.store(out + row * size + places, result.to(out.dtype.element_ty), mask=is_element)


@triton.jit  # type: ignore[untyped-decorator]
def _normed(
    row: tl.tensor,  # [width] float32, zeros beyond size
    weight: tl.tensor,
    size: int,
    eps: float,
    width: tl.constexpr,
) -> tl.tensor:
    places = tl.arange(0, width)
    scale = 1.0 / tl.sqrt(tl.sum(row * row, 0) / size + eps)
    return row * scale * tl.load(weight + places, mask=places < size, other=0.0)

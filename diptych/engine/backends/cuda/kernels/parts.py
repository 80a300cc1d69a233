"""Products whose inputs were cut into parts: put together."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def add_parts(
    parts: tl.tensor,  # [num_parts, num_rows, num_outputs] float32
    bias: tl.tensor,  # [num_outputs], or None
    out: tl.tensor,  # [num_rows, num_outputs]
    num_rows: int,
    num_outputs: int,
    num_parts: tl.constexpr,
    width: tl.constexpr,
) -> None:
    """In their order. Launched over (spans of a row, rows)."""
    row = tl.program_id(1).to(tl.int64)
    outputs = tl.program_id(0) * width + tl.arange(0, width)
    is_output = outputs < num_outputs
    sums = tl.zeros([width], tl.float32)
    for part in tl.static_range(num_parts):
        at = parts + (part * num_rows + row) * num_outputs + outputs
        sums += tl.load(at, mask=is_output, other=0.0)
    if bias is not None:
        sums += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + row * num_outputs + outputs, sums.to(out.dtype.element_ty), mask=is_output)

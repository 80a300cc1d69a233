"""The compact form of a weight: the small whole numbers that a GGUF file has of it.

A row of a weight is blocks of ``size`` numbers one behind the other. A block is a scale and
an offset, float32 both, and its numbers, a signed byte each. A number of the weight is
``scale * number + offset``, where the product is exact and the sum is rounded once: just the
float32 that the GGUF file's own type means, bit for bit.

An imported folder has the file beside the float32 weights, which stay what everybody else
reads: a safetensors file of uint8 tensors [rows, bytes of a row], named as the weights are.
Of a weight that is not there, no such form has the same bits. No torch and no numpy.
"""

FILE_NAME = "compact.safetensors"
HEAD_BYTES = 8  # a scale and an offset
BLOCK_SIZES = (16, 32)


def row_bytes(num_columns: int, block_size: int) -> int:
    """Of so many numbers, a multiple of the block's."""
    return num_columns // block_size * (HEAD_BYTES + block_size)


def block_size_of(num_bytes: int, num_columns: int) -> int | None:
    """Of a row of so many bytes and numbers; None where no block makes such rows."""
    sizes = (size for size in BLOCK_SIZES if num_columns % size == 0)
    return next((size for size in sizes if row_bytes(num_columns, size) == num_bytes), None)

"""What this machine can do at best: reading memory, and multiplying matrices.

Each figure is the largest of several ways to get there: torch's, and for products the
engine's own kernel on matrices that stay in cache, so that no engine is measured against one
library's weak spot, nor against less than it reaches itself. Memory is read from huge pages,
where the engine's weights lie. Runs on the thread whose number of threads is set.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from diptych.engine.backends.cpu.huge_pages import HugePages
from diptych.engine.backends.cpu.linear import make_linear, split_works
from tests.bench.roofline import Ceilings

# float32 as the sum of three bfloat16 numbers takes six products, where those are so much faster.
AS_PARTS, NUM_PRODUCTS = "float32 as bfloat16 parts", 6
# Of a product whose matrices stay in the second level of cache: rows of x, and inner.
_CACHED_SHAPES = ((256, 256), (512, 256), (512, 512))
_COLUMNS_A_THREAD = 256


class Machine(NamedTuple):
    """Sustained rates at one number of threads."""

    num_threads: int
    read_bytes_per_s: float
    # By element type: float32, that of the weights, and AS_PARTS where there is a matrix unit.
    flops_per_s: dict[str, float]

    def ceilings(self, weight_type: str) -> Ceilings:
        return Ceilings(
            self.read_bytes_per_s, self.flops_per_s["float32"], self.flops_per_s[weight_type]
        )

    def of_parts(self) -> Ceilings:
        """For float32 linears as products of parts. Raises KeyError: no matrix unit."""
        rate = self.flops_per_s[AS_PARTS]
        return Ceilings(self.read_bytes_per_s, self.flops_per_s["float32"], rate)

    def or_better(self, other: "Machine") -> "Machine":
        """The larger of two measurements of the same machine."""
        return Machine(
            self.num_threads,
            max(self.read_bytes_per_s, other.read_bytes_per_s),
            {name: max(rate, other.flops_per_s[name]) for name, rate in self.flops_per_s.items()},
        )


@torch.inference_mode()
def measure(num_threads: int, weight_type: str, *, quick: bool = False) -> Machine:
    """weight_type: float32, bfloat16 or int8. quick: small and rough, for tests."""
    torch.set_num_threads(num_threads)
    sizes, for_s = ((256,), 0.02) if quick else ((1024, 2048, 4096), 0.4)
    flops_per_s = {
        name: max(_matmul_rate(name, size, for_s) for size in sizes)
        for name in dict.fromkeys(["float32", weight_type])
    }
    own = max(_own_rate(rows, inner, num_threads, for_s) for rows, inner in _CACHED_SHAPES)
    if split_works():
        parts = max(_matmul_rate("bfloat16", size, for_s) for size in sizes)
        flops_per_s[AS_PARTS] = max(parts / NUM_PRODUCTS, own)
    else:
        flops_per_s["float32"] = max(flops_per_s["float32"], own)
    return Machine(num_threads, read_rate(2**22 if quick else 2**27, for_s), flops_per_s)


def _matmul_rate(element_type: str, size: int, for_s: float) -> float:
    if element_type == "int8":
        a = torch.randint(-127, 127, (size, size), dtype=torch.int8)
        return 2 * size**3 / _shortest_s(lambda: torch._int_mm(a, a), for_s)
    b = torch.randn(size, size).to(getattr(torch, element_type))
    out = torch.empty_like(b)
    return 2 * size**3 / _shortest_s(lambda: torch.mm(b, b, out=out), for_s)


def _own_rate(rows: int, inner: int, num_threads: int, for_s: float) -> float:
    """Of the engine's float32 product of many rows: x and the weight stay in the caches."""
    columns = _COLUMNS_A_THREAD * num_threads
    linear, x = make_linear(torch.randn(columns, inner)), torch.randn(rows, inner)
    return 2 * rows * inner * columns / _shortest_s(lambda: linear(x), for_s)


def read_rate(num_elements: int, for_s: float) -> float:
    """float32 elements; far more than a cache holds, unless quick."""
    values = HugePages().empty(4 * num_elements).view(torch.float32).fill_(1)
    columns = 4096
    matrix, vector = values.view(-1, columns), torch.ones(columns)
    ways: list[Callable[[], object]] = [
        values.sum,
        lambda: matrix @ vector,
        lambda: torch.dot(values[: num_elements // 2], values[num_elements // 2 :]),
    ]
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(matrix, 16)
        row = vector[None]
        ways.append(lambda: torch.ops.mkldnn._linear_pointwise(row, packed, None, "none", [], ""))
    except (AttributeError, RuntimeError):  # private to torch, and not everywhere
        pass
    return values.nbytes / min(_shortest_s(way, for_s) for way in ways)


def _shortest_s(work: Callable[[], object], for_s: float) -> float:
    """The shortest of its repetitions, after one that warms up."""
    work()
    shortest, end = float("inf"), time.perf_counter() + for_s
    while (begin := time.perf_counter()) < end:
        work()
        shortest = min(shortest, time.perf_counter() - begin)
    return shortest

"""What the CPU's kernels keep in vector registers stays there, on either kind of processor."""

import json
import os
import platform
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[4]

_AVX2 = "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+popcnt,+sse4.1,+sse4.2"
_AVX512 = f"{_AVX2},+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for x86-64")
@pytest.mark.parametrize(
    ("processor", "features", "num_lanes", "num_thin_tiles"),
    [("znver3", _AVX2, 8, 15 + 2), ("znver4", _AVX512, 16, 30 + 2)],
    ids=["avx2", "avx512"],
)
def test_no_inner_loop_moves_its_sums_to_the_stack(
    processor: str, features: str, num_lanes: int, num_thin_tiles: int
) -> None:
    """With one register too few in them steps of many rows took twice as long.

    Of compact weights with two rows of x some do, and it is faster than without such a tile.
    """
    compiled = subprocess.run(
        [sys.executable, "-m", "tests.unit.engine.backends.spilled"],
        env={**os.environ, "NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": features},
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        check=True,
        timeout=180,
    )
    found = json.loads(compiled.stdout)
    assert found["lanes"] == num_lanes
    kernels = Counter(name.split()[0] for name in found["moves"])
    assert kernels == {"thin_matmul": num_thin_tiles, "wide_matmul": 6, "prefill_loop": 9}
    assert {name: num for name, num in found["moves"].items() if num} == {}

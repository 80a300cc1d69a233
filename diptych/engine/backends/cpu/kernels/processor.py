"""What the processor that numba compiles for can do: found out here and nowhere else."""

from typing import Any

from numba.core.registry import cpu_target


def _features() -> frozenset[str]:
    # Of all that knows it, only this is there in every version that is supported.
    codegen: Any = cpu_target.target_context.codegen()
    return frozenset(codegen.magic_tuple()[2].split(","))


FEATURES = _features()  # as LLVM spells them: "+avx2", ...
# Floats of a vector register.
LANES = 16 if "+avx512f" in FEATURES else 8 if "+avx2" in FEATURES else 4
# Whether vectors of that many are multiplied and added in one instruction.
HAS_FMA = "+avx512f" in FEATURES or {"+avx2", "+fma"} <= FEATURES

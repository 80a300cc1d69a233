"""Where a figure was measured: without that it cannot be checked."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from llvmlite import binding

_PACKAGES = ("torch", "numba", "numpy", "grpcio", "nixl", "uvloop")
_NO_UNIT = "AVX512_CORE"
_SHOWN_FEATURES = ("avx2", "avx512f", "avx512vnni", "avx512bf16", "amx-tile", "amx-bf16")


def environment(*, without_unit: bool | None = None) -> dict[str, object]:
    """Commit, processor, and versions of what decides how fast we are.

    without_unit: whether what was measured did not use the matrix unit; None: as this process.
    """
    if without_unit is None:
        without_unit = os.environ.get("ONEDNN_MAX_CPU_ISA") == _NO_UNIT
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True)
    has = binding.get_host_cpu_features()
    return {
        "commit": commit.stdout.strip(),
        "is_changed": bool(changed.stdout.strip()),
        "cpu": _cpu_model(),
        "cpu_features": [name for name in _SHOWN_FEATURES if has.get(name)],
        "num_cores": os.cpu_count(),
        "kernel": platform.release(),
        "versions": {"python": platform.python_version(), **_versions()},
        "without_matrix_unit": without_unit,
    }


def without_matrix_unit() -> dict[str, str]:
    """Variables under which no program multiplies on the processor's matrix unit (AMX).

    Ours and torch's, and every peer that multiplies with oneDNN. They count only where they are
    set before the program starts.
    """
    features = binding.get_host_cpu_features()
    ours = ",".join(
        ("+" if there and not name.startswith("amx") else "-") + name
        for name, there in sorted(features.items())
    )
    return {"ONEDNN_MAX_CPU_ISA": _NO_UNIT, "NUMBA_CPU_FEATURES": ours}


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found

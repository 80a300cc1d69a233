"""What no machine without a GPU can tell of the CUDA backend: ``make gpu``.

    python -m tests.gpu.check --out gpu.json

Random weights of real shapes against transformers, attention against torch's own, digests and
draws against the host's, graphs and two steps in flight against neither, products with weights of
small numbers against their definition, pulls between two processes from and to the device over each
way; one JSON with the machine and the versions. Exit code 1 if
anything does not hold. Without a GPU it says so.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from diptych.engine.backends.choice import make_backend
from diptych.errors import ConfigurationError
from tests.gpu import attention, golden, handoff, overlap, products

DTYPES = (torch.float32, torch.bfloat16)
_COPIED_BYTES = 1 << 30
_PARTS = ("attention", "digests", "draws", "overlap", "products", "handoff", "golden")


def run() -> dict[str, Any]:
    """Everything, on this machine's GPU. Raises ConfigurationError: there is none to use."""
    backend = make_backend("cuda")
    # These need triton.
    from diptych.engine.backends.cuda.backend import CudaBackend
    from tests.gpu import digests, draws

    device = backend.device
    watch = attention.device_seconds
    return {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "copy_bytes_per_s": attention.copy_bytes_per_s(device, _COPIED_BYTES, watch),
        "attention": [
            asdict(attention.check(case, backend, torch.bfloat16, watch))
            for case in attention.CASES
        ],
        "digests": [
            *(asdict(digests.check(case, device, watch)) for case in digests.CASES),
            asdict(digests.check_beside(device)),
        ],
        "draws": [asdict(draws.check(case, device, watch)) for case in draws.CASES],
        "overlap": [
            asdict(overlap.check(golden.SHAPES[0], CudaBackend(device), backend, dtype))
            for dtype in DTYPES
        ],
        "products": [
            asdict(products.check(case, backend, torch.bfloat16, watch))
            for case in products.CASES
            if case.stored != "fp8" or torch.cuda.get_device_capability(device) >= (9, 0)
        ],
        "handoff": [asdict(handoff.check(case, str(device))) for case in handoff.CASES],
        "golden": [asdict(golden.check(shape, backend, DTYPES)) for shape in golden.SHAPES],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench-gpu.json"))
    out: Path = parser.parse_args().out
    try:
        found = run()
    except ConfigurationError as error:
        sys.stdout.write(f"skipped, nothing was checked: {error.message}\n")
        return 0
    out.write_text(json.dumps(found, indent=1))
    sys.stdout.write(out.read_text() + "\n")
    return 0 if all(each["holds"] for part in _PARTS for each in found[part]) else 1


if __name__ == "__main__":
    sys.exit(main())

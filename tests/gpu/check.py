"""What no machine without a GPU can tell of the CUDA backend: ``make gpu``.

    python -m tests.gpu.check --out gpu.json

Random weights of real shapes against transformers, also left alone with their own tokens; pulls
between two processes from and to the device over each way, prompts of one process that another one
goes on with, a whole cluster of which a worker is killed, and how pulls disturb a running batch;
memory that runs out and a device that is lost; whole steps against what the device can do at best,
attention against torch's own, digests and draws against the host's, graphs and two steps in flight
against neither, products with weights of small numbers against their definition; one JSON with the
machine and the versions. Exit code 1 if anything does not hold, breaks, or was left out for lack of
time. Without a GPU it says so.
"""

import argparse
import sys
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch

from diptych.engine.backends.base import Backend
from diptych.engine.backends.choice import make_backend
from diptych.engine.model.config import ModelConfig
from diptych.errors import ConfigurationError
from tests.gpu import (
    attention,
    continued,
    disturbed,
    faults,
    free_running,
    golden,
    handoff,
    overlap,
    products,
    served,
    speed,
)
from tests.gpu.checklist import Check, go_through
from tests.gpu.models import MODELS

DTYPES = (torch.float32, torch.bfloat16)
BUDGET_S = 420.0  # so that all ends within eight minutes
PARTS = (
    "golden",
    "free_running",
    "handoff",
    "continued",
    "served",
    "faults",
    "speed",
    "disturbed",
    "attention",
    "overlap",
    "draws",
    "digests",
    "products",
)
_PRODUCT_SIZE = 8192  # rows of the largest product
_FP8_CAPABILITY = (9, 0)


def checks(backend: Backend, capability: tuple[int, int]) -> list[Check]:
    """What is worth most, first."""
    # These need triton.
    from diptych.engine.backends.cuda.backend import CudaBackend
    from tests.gpu import digests, draws

    device, watch, dtype = backend.device, attention.device_seconds, torch.bfloat16
    eager = CudaBackend(device)

    def timed(model: speed.Model) -> Any:
        limit = speed.ceilings(device, dtype, _PRODUCT_SIZE, watch)
        return speed.check(model, backend, dtype, limit, speed.busy_seconds)

    def out_of_memory() -> object:
        config = ModelConfig.from_hf({**MODELS["Llama-3.1-8B"], "num_hidden_layers": 4})
        filled = faults.filled_device(device)
        return faults.check_memory("Llama-3.1-8B, 4 layers", config, backend, dtype, filled)

    found = [
        _one("golden", shape.name, partial(golden.check, shape, backend, DTYPES))
        for shape in golden.SHAPES
    ]
    found += [
        Check("free_running", shape.name, partial(free_running.check, shape, backend, DTYPES))
        for shape in golden.SHAPES
    ]
    found += [
        _one("handoff", repr(way), partial(handoff.check, way, str(device)))
        for way in handoff.CASES
    ]
    found += [
        _one("continued", case.transport, partial(continued.check, case, backend))
        for case in continued.CASES
    ]
    found.append(
        _one("served", golden.SHAPES[0].name, partial(served.check, golden.SHAPES[0], device))
    )
    found.append(_one("faults", "a lost device", partial(faults.check_loss, device)))
    found.append(_one("faults", "no memory for a step", out_of_memory))
    found += [Check("speed", model.name, partial(timed, model)) for model in speed.MODELS_TIMED]
    found += [
        _one(
            "disturbed",
            repr(way),
            partial(disturbed.check, way, disturbed.MODEL, disturbed.BATCH, backend, dtype),
        )
        for way in disturbed.CASES
    ]
    found += [
        _one("attention", repr(case), partial(attention.check, case, backend, dtype, watch))
        for case in attention.CASES
    ]
    found += [
        _one("overlap", str(each), partial(overlap.check, golden.SHAPES[0], eager, backend, each))
        for each in DTYPES
    ]
    found += [
        _one("draws", repr(rules), partial(draws.check, rules, device, watch))
        for rules in draws.CASES
    ]
    found += [
        _one("digests", repr(blocks), partial(digests.check, blocks, device, watch))
        for blocks in digests.CASES
    ]
    found.append(_one("digests", "beside a step", partial(digests.check_beside, device)))
    found += [
        _one("products", repr(weight), partial(products.check, weight, backend, dtype, watch))
        for weight in products.CASES
        if weight.stored != "fp8" or capability >= _FP8_CAPABILITY
    ]
    return found


def _one(part: str, case: str, do: Callable[[], object]) -> Check:
    return Check(part, case, lambda: [do()])


def run(out: Path, parts: Collection[str], budget_s: float) -> bool:
    """On this machine's GPU. Raises ConfigurationError: there is none to use.

    parts: those to check, all where there are none.
    """
    backend = make_backend("cuda")
    device = backend.device
    facts = {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "copy_bytes_per_s": attention.copy_bytes_per_s(device, 1 << 30, attention.device_seconds),
    }
    capability = torch.cuda.get_device_capability(device)
    asked = [each for each in checks(backend, capability) if not parts or each.part in parts]
    return go_through(asked, facts, out, budget_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench-gpu.json"))
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=(), metavar="PART", help=", ".join(PARTS)
    )
    parser.add_argument(
        "--budget", type=float, default=BUDGET_S, metavar="S", help="none begins later"
    )
    told = parser.parse_args()
    out: Path = told.out
    try:
        holds = run(out, told.only, told.budget)
    except ConfigurationError as error:
        sys.stdout.write(f"skipped, nothing was checked: {error.message}\n")
        return 0
    sys.stdout.write(out.read_text() + "\n")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())

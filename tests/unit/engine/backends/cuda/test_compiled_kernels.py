"""Every kernel is compiled for real devices, as a layer of a real model launches it."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import notes

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed: its kernels cannot be compiled"
)

KERNELS = {
    "add_norm", "add_words", "attend_parts", "attend_tiles", "cut", "draw", "find_largest", "gate",
    "merge_parts", "norm", "rotate", "weigh", "write",
}  # fmt: skip
OF_GROUPS = {"add_parts", "multiply", "sum_groups", "widen"}
OF_FP8 = {"add_parts", "multiply_rounded", "round_rows", "sum_row"}
ROUNDING = {"add_norm", "norm"}
ATTENTION = {"attend_parts", "attend_tiles", "merge_parts", "write"}
NUM_AGAIN = 8
# Of a program. What sm_80 gets is what smaller devices get, which have 99 KiB.
MAX_SHARED_BYTES = {80: 99 << 10, 89: 99 << 10, 90: 227 << 10}


@pytest.mark.timeout(1800)
def test_no_kernel_spills(tmp_path: Path, note: notes.Note) -> None:
    """In bfloat16, for sm_80 and sm_90; attention for sm_89 where that is another, as in float32.

    In a process of its own, as this one interprets. What they take is what the documents say.
    What was compiled before is in a record: some of that, others in each run, is compiled again.
    """
    from tests.bench import kernel_resources

    out = tmp_path / "resources.json"
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.bench.kernel_resources", "--again", str(NUM_AGAIN)]
    said = subprocess.run(
        [*command, "--json", str(out)],
        env=variables | {"TRITON_CACHE_DIR": str(tmp_path / "cache")},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    num_compiled = int(said.removeprefix("compiled: "))
    found = json.loads(out.read_text())
    layers = [part for part in found if part["cache"] != "-"]
    products = {(part["model"], part["capability"], part["kernel"]) for part in found}
    products -= {(part["model"], part["capability"], part["kernel"]) for part in layers}
    wanted = {
        (f"{numbers} weights", capability, kernel)
        for numbers in ("INT4", "INT8", "FP8")
        for capability in (80, 90)
        for kernel in OF_GROUPS
    }
    wanted |= {
        (f"{numbers} weights", capability, "sum_row")
        for numbers in ("INT8", "bfloat16")
        for capability in (80, 90)
    }
    assert products == wanted | {("fp8", 90, kernel) for kernel in OF_FP8 | ROUNDING}
    kinds = Counter((part["model"], part["capability"]) for part in layers)
    assert len(kinds) == 5 * 2 + 2
    for model, capability in kinds:
        names = {
            part["kernel"]
            for part in layers
            if (part["model"], part["capability"]) == (model, capability)
        }
        assert names == (ATTENTION if capability == 89 else KERNELS)
    caches = {(part["cache"], part["capability"]) for part in layers}
    assert caches == {
        *((cache, each) for cache in ("bfloat16", "int8", "float8_e4m3fn") for each in (80, 90)),
        *((cache, 89) for cache in ("float8_e4m3fn", "float32")),
    }
    assert [part for part in found if part["num_stack_bytes"]] == []
    for part in found:
        assert part["num_shared_bytes"] <= MAX_SHARED_BYTES[part["capability"]], part
    document = (Path(__file__).parents[5] / "docs/gpu.md").read_text()
    in_document = set(re.findall(r"^\| `(\w+)` \|", document, re.MULTILINE))
    assert in_document == KERNELS | OF_GROUPS | OF_FP8
    if f"triton {version('triton')}," in document:  # others compile otherwise
        lines = kernel_resources.largest([kernel_resources.Resources(**part) for part in found])
        assert "\n".join(lines) in document
    largest = max(found, key=lambda part: int(part["num_registers"]))
    note(
        f"{len(found)} kernels compiled for sm_80, sm_89 and sm_90 without spills, "
        f"{num_compiled} of them now; {largest['num_registers']} registers at the most"
    )

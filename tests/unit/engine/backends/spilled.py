"""Prints how often the inner loops of the CPU's kernels move a vector to the stack.

A program of its own, as numba compiles for one processor in a process: NUMBA_CPU_NAME and
NUMBA_CPU_FEATURES say which. Nothing that is compiled is run.
"""

import importlib
import json
import re
import sys
from collections import Counter
from typing import Final
from unittest.mock import patch

from diptych.engine.backends.cpu.kernels import loop, processor

_KERNELS: Final = {  # and the loops of each in which the time goes
    "thin_matmul": ("_multiply", r"(tile|compact_tile_1)_\d"),
    "wide_matmul": ("_multiply", r"multiply_\d"),
    "prefill_loop": ("attend", r"tile_(scores|sums)_\d"),
}
_TO_STACK: Final = re.compile(r"vmov\w+\s+%[yz]mm\d+, -?\d*\(%r[sb]p\)")


def num_moves(assembly: str, function: str) -> Counter[str]:
    """Of each of those functions, in its first loop: what follows is for the ends of rows."""
    found, name, label, num = Counter[str](), "", "", 0
    for line in assembly.splitlines():
        if begun := re.match(r"([\w.]+):", line):
            label, num = begun[1], 0
            if not label.startswith(".L"):
                name = label
        elif re.match(function, name) and name not in found:
            num += bool(_TO_STACK.search(line))
            if re.search(rf"\sj\w+\s+{re.escape(label)}$", line):
                found[name] = num
    return found


def main() -> None:
    moves = Counter[str]()
    for kernel, (name, function) in _KERNELS.items():
        with patch.object(loop, "code_cache", return_value=None):  # or else nothing is compiled
            module = importlib.import_module(f"{loop.__package__}.{kernel}")
        assembly = getattr(module, name)._compiled._library.get_asm_str()
        found = num_moves(assembly, function)
        moves.update({f"{kernel} {each}": num for each, num in found.items()})
    json.dump({"lanes": processor.LANES, "moves": moves}, sys.stdout)


if __name__ == "__main__":
    main()

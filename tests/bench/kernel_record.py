"""What compiled kernels take, written down: what is there need not be compiled again.

The key of an entry is of all that its machine code is made of: the source of the kernel and of
what it calls, types, constants and options of the launch, and the versions of triton and of its
assembler. The record is of one version of triton; with another it has no entry. After a change of
a kernel ``python -m tests.bench.kernel_resources --record`` writes it anew.
"""

import hashlib
import json
import pkgutil
import random
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction

from diptych.engine.backends.cuda import kernels

PATH = Path(__file__).with_name("kernel_record.json")


@dataclass(frozen=True, slots=True)
class Taken:
    """Of a processor, by one kernel as it was compiled."""

    kernel: str
    num_warps: int
    num_registers: int  # of a thread
    num_stack_bytes: int  # of a thread; what did not fit into registers lies there
    num_shared_bytes: int  # of a program


class KernelRecord:
    """What is written down, and what was compiled in its place.

    ``before_compiling`` is triton's hook. One process, one of these.
    """

    def __init__(self, path: Path | None, num_again: int = 0) -> None:
        """``num_again`` entries of ``path``, any, are compiled again; nothing is known of None."""
        written = json.loads(path.read_text()) if path else {"triton": None, "kernels": {}}
        self.compiled: dict[str, Taken] = {}
        self.used: dict[str, Taken] = {}
        self._known: dict[str, Taken] = {}
        if written["triton"] == triton.__version__:
            self._known = {key: Taken(**each) for key, each in written["kernels"].items()}
        self._again = set(random.sample(sorted(self._known), min(num_again, len(self._known))))
        self._keys: dict[str, str] = {}  # by triton's own, of those that were compiled
        self._asked = ""
        # Triton's key of a source tells where in its file it begins, which decides nothing here.
        for module in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
            for each in vars(import_module(module.name)).values():
                if isinstance(each, JITFunction):
                    each.starting_line_number = 0

    def before_compiling(self, *, fn: Any, compile: Mapping[str, Any], **_: object) -> bool:
        """Whether that is not to be done, as it is known what the kernel takes."""
        target = triton.runtime.driver.active.get_current_target()
        self._asked = key = _key(fn.jit_function, compile["specialization_data"], target)
        return key in self._known and key not in self._again

    def taken(self, kernel: Any | None) -> tuple[str, Taken]:
        """The key of what was launched last, and what it takes; None was not compiled.

        Raises ValueError where what was written down is another thing.
        """
        if kernel is None:
            self.used[self._asked] = self._known[self._asked]
            return self._asked, self._known[self._asked]
        key = self._keys.setdefault(kernel.hash, self._asked)  # no hook is called a second time
        if key not in self.compiled:
            self.compiled[key] = taken = _measured(kernel)
            if self._known.get(key, taken) != taken:
                raise ValueError(f"{key} takes {taken}; in {PATH.name} it is {self._known[key]}")
        return key, self.compiled[key]

    def write(self, path: Path) -> None:
        """All that was launched, one a line."""
        lines = [
            f'  "{key}": {json.dumps(asdict(each))}'
            for key, each in sorted((self.used | self.compiled).items())
        ]
        head = f'{{"triton": "{triton.__version__}", "kernels": {{\n'
        path.write_text(head + ",\n".join(lines) + "\n}}\n")


def _key(kernel: Any, specialization: str, target: GPUTarget) -> str:
    launch = json.loads(specialization)
    del launch["key"]  # of the others, with paths
    libraries = launch["options"].pop("extern_libs")
    parts = [
        triton.__version__,
        make_backend(target).hash(),  # with the assembler's version
        sorted(get_cache_invalidating_env_vars().items()),
        kernel.cache_key,
        [(name, hashlib.sha256(Path(path).read_bytes()).hexdigest()) for name, path in libraries],
        launch,
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _measured(kernel: Any) -> Taken:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", report)
    assert used is not None, report
    num_registers, num_stack_bytes, num_local_bytes = map(int, used.groups())
    return Taken(
        kernel=kernel.name,
        num_warps=kernel.metadata.num_warps,
        num_registers=num_registers,
        num_stack_bytes=num_stack_bytes + num_local_bytes,
        num_shared_bytes=kernel.metadata.shared,
    )

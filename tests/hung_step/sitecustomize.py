"""Makes the model steps of one process hang, as on a device that never answers.

Python imports this file by itself at the start of a process whose PYTHONPATH names this
folder (see tests/hanging.py). Of the processes whose command lines contain ``HANG_PROCESS``
the first that begins a step once the file ``HANG_FLAG`` exists takes it away, and hangs.
"""

import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_RUNNER = "diptych.engine.runner"


class RunnerFinder:
    """Finds the runner's module as everybody does, once, and hangs its steps."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _RUNNER:
            return None
        sys.meta_path.remove(cls)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        load = loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            execute = module.Runner.execute

            def hang_or_execute(runner: object, plan: object) -> object:
                flag = os.environ["HANG_FLAG"]
                try:
                    os.rename(flag, f"{flag}.{os.getpid()}")
                except FileNotFoundError:
                    return execute(runner, plan)
                while True:
                    time.sleep(3600)

            module.Runner.execute = hang_or_execute

        loader.exec_module = exec_module
        return spec


if os.environ.get("HANG_PROCESS", "\0") in " ".join(sys.orig_argv):
    sys.meta_path.insert(0, RunnerFinder)

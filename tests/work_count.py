"""How much work a call does, counted and not timed."""

import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any


def num_lines_run(module: ModuleType, call: Callable[[], object]) -> int:
    """How many lines of ``module`` run in ``call``; a line that runs again counts again."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename != module.__file__:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count

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


def num_calls(call: Callable[[], object]) -> int:
    """How many functions written in Python are called in ``call``; of a generator each item counts
    as a call.
    """
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return count

"""Several loops, one after another, in one parallel region.

The loops of a decode step are many and short: starting threads for each, and Python
between them, costs more than much of their work. A program is written once; to run
it again costs one call.

Threads go through the calls side by side and take items of each while there are any.
A call is done when no item is left and nobody is at one: a thread that has lost its
core between items holds up nobody, and finds later what is left to do.
"""

import ctypes
import platform
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from diptych.engine.backends.cpu.kernels.loop import (
    COUNTER,
    FIRST_ARGUMENT,
    NUM_ITEMS,
    WORDS,
    Call,
    Loop,
    words_at,
)

# What is kept of a call: a cache line. Its task follows, in as many as it needs.
_FUNCTION, _TASK, _ENTERED, _LEFT, _ENDED = range(5)
_LINE_WORDS, _WORD_BYTES = 8, 8
# What the program's own loop is given.
_RECORDS, _NUM_CALLS, _YIELD = range(FIRST_ARGUMENT, FIRST_ARGUMENT + 3)
_PATIENCE = 20_000  # looks, about a millisecond, before a waiting thread offers its core to others

_I64 = ir.IntType(64)


def _invoke_code(_typing: Any, function: Any, argument: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        words = _I64.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [words]).as_pointer()
        function, argument = arguments
        builder.call(builder.inttoptr(function, kind), [builder.inttoptr(argument, words)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _add_one_code(_typing: Any, words: Any, index: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        words, index = arguments
        return builder.atomic_rmw("add", builder.gep(words, [index]), _I64(1), "seq_cst")

    return types.int64(WORDS, types.int64), generate


def _look_code(_typing: Any, words: Any, index: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        words, index = arguments
        return builder.load_atomic(builder.gep(words, [index]), "seq_cst", _WORD_BYTES)

    return types.int64(WORDS, types.int64), generate


def _call_llvm(builder: Any, name: str, result: Any) -> Any:
    function = ir.FunctionType(result, [])
    called = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
        builder.module, function, name
    )
    return builder.call(called, [])


def _pause_code(_typing: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        if platform.machine() in {"x86_64", "AMD64"}:
            _call_llvm(builder, "llvm.x86.sse2.pause", ir.VoidType())
        return context.get_dummy_value()

    return types.void(), generate


def _clock_code(_typing: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        return _call_llvm(builder, "llvm.readcyclecounter", _I64)

    return types.int64(), generate


_invoke: Any = intrinsic(_invoke_code)  # the function at an address, with an address
_add_one: Any = intrinsic(_add_one_code)  # to words[index]; returns what it was
_look: Any = intrinsic(_look_code)  # at words[index], as it is now
_pause: Any = intrinsic(_pause_code)  # what a processor wants between looks
_clock: Any = intrinsic(_clock_code)  # counts at a steady rate


def _follow(program: Any) -> None:
    """All calls in turn, as one of the threads."""
    for index in range(program[_NUM_CALLS]):
        call = words_at(program[_RECORDS] + index * _LINE_WORDS * _WORD_BYTES)
        task = words_at(call[_TASK])
        num_items = task[NUM_ITEMS]
        if _look(task, COUNTER) < num_items:
            _add_one(call, _ENTERED)
            _invoke(call[_FUNCTION], call[_TASK])
            _add_one(call, _LEFT)
        looks = 0
        while True:
            # In this order, nobody can have entered and taken an item unseen.
            taken, left = _look(task, COUNTER), _look(call, _LEFT)
            if taken >= num_items and left == _look(call, _ENTERED):
                break
            looks += 1
            if looks < _PATIENCE:
                _pause()
            else:
                _invoke(program[_YIELD], 0)
        call[_ENDED] = _clock()


_run = Loop(_follow)


def _address_of_yield() -> int:
    """Of the system's function that lets other threads have the core."""
    return ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0


class Program:
    """Calls in a fixed order, each after the one before is done. One thread runs it.

    Keeps the tensors that the calls were made with alive.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = tuple(calls)
        words = [call.words for call in calls]
        num_lines = [-(-len(task) // _LINE_WORDS) for task in words]
        ends = _LINE_WORDS * (len(calls) + np.cumsum(num_lines))
        self._memory = torch.zeros(int(ends[-1]), dtype=torch.int64)  # begins with a line
        self._words = self._memory.numpy()
        self._records = self._words[: len(calls) * _LINE_WORDS].reshape(-1, _LINE_WORDS)
        self._tasks = ends - _LINE_WORDS * np.array(num_lines)  # where they begin
        self._records[:, _FUNCTION] = [call.loop.address for call in calls]
        self._records[:, _TASK] = self._memory.data_ptr() + _WORD_BYTES * self._tasks
        for begin, task in zip(self._tasks, words, strict=True):
            self._words[begin : begin + len(task)] = task
        self._task = [0, 0, self._memory.data_ptr(), len(calls), _address_of_yield()]

    def update(self, indices: NDArray[np.int64], words: Sequence[int]) -> None:
        """Give some calls another number of items, and other first arguments."""
        places = self._tasks[indices, None] + NUM_ITEMS + np.arange(len(words))
        self._words[places] = words

    def run(self, num_threads: int) -> None:
        """Do every call."""
        self._words[self._tasks + COUNTER] = 0
        self._records[:, _ENTERED : _LEFT + 1] = 0
        _run.run(self._task, num_threads)

    @property
    def shares(self) -> NDArray[np.float64]:
        """Of each call in the time of the last run, from the end of the first call on."""
        ends = self._records[:, _ENDED]
        shares: NDArray[np.float64] = np.diff(ends, prepend=ends[0]) / (ends[-1] - ends[0])
        return shares

"""Compiled loops that run on torch's own threads.

numba's thread pools stand beside torch's: after each call one pool's threads spin
for work while the other's need the core. A loop here is a C function, compiled by
numba, that is handed to the OpenMP runtime torch itself uses, and its threads take
items one by one from a shared counter. Calling one costs about as much as a torch
operator's dispatch, and releases the GIL.

The function gets one pointer, to 64-bit integers: :data:`COUNTER`,
:data:`NUM_ITEMS`, then its own arguments, of which tensors are addresses. It does
the items that :func:`next_item` gives it until none is left.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numba
import torch
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from diptych.code_cache import code_cache

_SOURCES = Path(__file__).parent

COUNTER, NUM_ITEMS, FIRST_ARGUMENT = 0, 1, 2  # places in what a loop is given

WORDS: Any = types.CPointer(types.int64)  # type: ignore[no-untyped-call]
SIGNATURE = types.void(WORDS)

# Sums may be reordered; infinities and NaNs keep their meaning.
FLOAT_RULES: dict[str, Any] = {
    "error_model": "numpy",
    "fastmath": {"reassoc", "contract", "nsz"},
}


class Loop:
    """A compiled loop over independent items."""

    def __init__(
        self, function: Callable[[Any], None], float_rules: dict[str, Any] = FLOAT_RULES
    ) -> None:
        """Compile it, or find it in the cache."""
        folder = code_cache(_SOURCES)
        if folder is not None:
            numba.config.CACHE_DIR = str(folder)  # type: ignore[attr-defined]
        compiled = numba.cfunc(SIGNATURE, cache=folder is not None, **float_rules)(function)
        self._compiled = compiled  # keeps the code alive
        self._call = compiled.ctypes
        self.name = function.__module__.rpartition(".")[2]  # for profiles
        self.address = int(compiled.address or 0)

    def __call__(self, num_items: int, num_threads: int, *arguments: int | Tensor) -> None:
        """Do every item. Tensors must be contiguous."""
        self.call(num_items, *arguments).run(num_threads)

    def call(self, num_items: int, *arguments: int | Tensor) -> "Call":
        """To be run later. Tensors must be contiguous."""
        return Call(self, num_items, arguments)

    def run(self, words: list[int], num_threads: int) -> None:
        """Do what ``words`` say."""
        task = (ctypes.c_int64 * len(words))(*words)
        start_team = _team_starter() if num_threads > 1 else None
        if start_team is None:
            self._call(task)
        else:
            start_team(self.address, task, num_threads, 0)


class Call(NamedTuple):
    """A loop and what it is given: to be run, once or often."""

    loop: Loop
    num_items: int
    arguments: tuple[int | Tensor, ...]  # tensors are contiguous

    @property
    def words(self) -> list[int]:
        """What the loop's function gets."""
        arguments = (a.data_ptr() if isinstance(a, Tensor) else a for a in self.arguments)
        return [0, self.num_items, *arguments]

    def run(self, num_threads: int) -> None:
        """Do every item."""
        self.loop.run(self.words, min(num_threads, self.num_items))


def has_team() -> bool:
    """Whether loops can use more than one thread here."""
    return _team_starter() is not None


@cache
def _team_starter() -> Any | None:
    """``GOMP_parallel`` of the runtime that torch is linked with; None if it has another."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        start: Any = library.GOMP_parallel
    except (OSError, AttributeError):
        return None
    start.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    start.restype = None
    return start


def _intrinsic(function: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """numba's decorator, typed as what it makes is called."""
    made: Any = intrinsic(function)
    return made  # type: ignore[no-any-return]


@_intrinsic
def next_item(typing: Any, task: Any) -> Any:
    """Take one item; NUM_ITEMS or more when none is left. task: what the loop was given."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        one = context.get_constant(types.int64, 1)
        return builder.atomic_rmw("add", arguments[0], one, "acq_rel")

    return types.int64(WORDS), generate


def _pointer_to(element: Any) -> Callable[[Any], Any]:
    """What makes an address a pointer for ``numba.carray``."""
    pointer: Any = types.CPointer(element)  # type: ignore[no-untyped-call]

    def code(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return pointer(types.int64), generate

    return _intrinsic(code)


floats_at = _pointer_to(types.float32)
words_at = _pointer_to(types.int64)
int8s_at = _pointer_to(types.int8)
int16s_at = _pointer_to(types.int16)
int32s_at = _pointer_to(types.int32)


@_intrinsic
def float_of_bits(typing: Any, bits: Any) -> Any:
    """The float32 that a 32-bit integer spells."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.int32), generate

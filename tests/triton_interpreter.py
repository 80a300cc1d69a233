"""The CUDA backend on the host, for tests: its kernels are interpreted on tensors of torch.

Triton decides when it is imported whether kernels are interpreted, so this must be the first
in its process that brings it in. A process that compiles kernels needs the variable unset.
"""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

if "triton" in sys.modules and "TRITON_INTERPRET" not in os.environ:
    raise ImportError("triton was imported before tests.triton_interpreter: nothing is interpreted")
os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="triton is not installed: its kernels cannot be tried")

import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

from diptych.engine.backends.cuda.backend import CudaBackend

INTERPRETED = CudaBackend(torch.device("cpu"))
_create_dot = InterpreterBuilder.create_dot


def _dot(self: InterpreterBuilder, a: Any, b: Any, d: Any, *how: Any) -> Any:
    """A row has the same bits wherever in a tile it is, as on a device.

    numpy's product of float32 has not, on some processors; one of float64 has once it is rounded.
    """
    factors = [each.data for each in (a, b)]
    if a.dtype.scalar == b.dtype.scalar == tl.float8e4nv:
        bits = (torch.from_numpy(np.ascontiguousarray(each)) for each in factors)
        factors = [each.view(torch.float8_e4m3fn).float().numpy() for each in bits]
    if not all(each.dtype == np.float32 for each in (*factors, d.data)):
        return _create_dot(self, a, b, d, *how)
    product = np.matmul(*factors, dtype=np.float64).astype(np.float32)
    return TensorHandle(product + d.data, d.dtype.scalar)


InterpreterBuilder.create_dot = _dot
_convert_float = interpreter._convert_float


def _converted(numbers: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Into e4m3 as devices convert: triton's own neither carries nor knows NaN."""
    if target != tl.float8e4nv or source != tl.float32:
        return _convert_float(numbers, source, target, rounding)
    floats = torch.from_numpy(np.ascontiguousarray(numbers).view(np.float32))
    return floats.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


interpreter._convert_float = _converted
_patch_lang = interpreter._patch_lang
_patched: set[object] = set()


class _Nothing:
    """What was changed of the language stays: here it is for the interpreter alone."""

    def restore(self) -> None:
        pass


def _patch_once(kernel: Any) -> _Nothing:
    """What each launch and each call of a function does: that took a third of the time."""
    if kernel not in _patched:
        _patch_lang(kernel)
        _patched.add(kernel)
    return _Nothing()


interpreter._patch_lang = _patch_once
_get_np_dtype = interpreter._get_np_dtype
_np_dtypes: dict[str, Any] = {}


def _np_dtype(kind: Any) -> Any:
    """The same as triton's, which makes a table for each answer."""
    kind = kind.element_ty if isinstance(kind, tl.block_type) else kind
    if isinstance(kind, tl.pointer_type):
        return _get_np_dtype(kind)
    if kind.name not in _np_dtypes:
        _np_dtypes[kind.name] = _get_np_dtype(kind)
    return _np_dtypes[kind.name]


interpreter._get_np_dtype = _np_dtype


@contextmanager
def one_kernel_at_a_time() -> Iterator[None]:
    """Several threads may launch kernels: the interpreter itself can do one."""
    launch, lock = GridExecutor.__call__, threading.Lock()

    def launched(self: GridExecutor, *arguments: object, **named: object) -> None:
        with lock:
            launch(self, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", launched)
        yield

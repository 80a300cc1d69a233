"""Writes a layer's keys and values into a cache of host memory by compiled loops."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from diptych.engine.backends.cpu.kernels.int8_slot_loop import write_int8_slots
from diptych.engine.backends.cpu.kernels.loop import Call
from diptych.engine.backends.cpu.kernels.slot_loop import write_slots
from diptych.engine.backends.torch.kv_access import KVAccess

_SERIAL_SIZE = 1 << 15  # numbers; below, starting threads costs more than they do

# Of rows, where they go, what is added to that, and the cache's runs.
_MakeCall = Callable[[Tensor, Tensor, int, Tensor], Call]


class KVWriter:
    """The bits of :meth:`KVAccess.write`. float32 as it is, and anything into int8."""

    def __init__(self, access: KVAccess, make_call: _MakeCall) -> None:
        self._access, self._make_call = access, make_call

    @classmethod
    def of(cls, access: KVAccess) -> Self | None:
        """None where there is no loop for this cache."""
        if access.has_scales:

            def write_int8(rows: Tensor, indices: Tensor, offset: int, runs: Tensor) -> Call:
                return write_int8_slots(rows, indices, offset, runs, access.block_size)

            return cls(access, write_int8)
        is_float32 = access.is_exact and access.runs.dtype is torch.float32
        return cls(access, write_slots) if is_float32 else None

    def __call__(self, layer: int, slot_rows: Tensor, kv: Tensor) -> None:
        num_threads = 1 if kv.numel() < _SERIAL_SIZE else torch.get_num_threads()
        self.call(layer, slot_rows, kv).run(num_threads)

    def call(self, layer: int, slot_rows: Tensor, kv: Tensor) -> Call:
        """What writes, to be run later."""
        tokens = kv.reshape(-1, self._access.head_dim).float().contiguous()
        return self._make_call(tokens, slot_rows, self._access.first_slot(layer), self._access.runs)

"""Stopwatches around the engine's seams, for profiles: forward pass, linears, attention.

They are put on classes while a context is open and cost about a microsecond per
call, so passes that are profiled are not the passes that are measured.
"""

import functools
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from diptych.engine.backends.cpu.decode_program import DecodePrograms
from diptych.engine.backends.cpu.kernels.program import Program
from diptych.engine.backends.cpu.kv_writer import KVWriter
from diptych.engine.backends.torch.attention import PagedStep
from diptych.engine.backends.torch.kv_access import KVAccess
from diptych.engine.model.decoder import Decoder

_FORWARD: tuple[tuple[type, str], ...] = (
    (Decoder, "forward"),
    (Decoder, "logits"),
    (DecodePrograms, "decode"),
)
_LINEARS, _ATTENTION = {"thin_matmul", "int8_loops"}, {"paged_loops"}  # loops of programs


class Stopwatch:
    """Seconds inside; a call within a call counts once. One thread."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._depth = 0
        self._began_s = 0.0

    def __enter__(self) -> None:
        if not self._depth:
            self._began_s = time.perf_counter()
        self._depth += 1

    def __exit__(self, *exc: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.total_s += time.perf_counter() - self._began_s

    @contextmanager
    def on(self, owner: type, name: str) -> Iterator[None]:
        """Time a class's method while open."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self:
                return original(*args, **kwargs)

        setattr(owner, name, timed)
        try:
            yield
        finally:
            setattr(owner, name, original)


@contextmanager
def forward_timed() -> Iterator[Stopwatch]:
    """Everything between a step's inputs and its logits."""
    watch = Stopwatch()
    with ExitStack() as stack:
        for owner, name in _FORWARD:
            stack.enter_context(watch.on(owner, name))
        yield watch


class Parts:
    """Where a forward pass spends its time, s."""

    def __init__(self) -> None:
        self.forward, self.linears, self.attention = Stopwatch(), Stopwatch(), Stopwatch()
        self.kv_write = Stopwatch()  # within attention

    def shares(self) -> dict[str, float]:
        """Shares of the forward pass, which sum to 1.

        small: norms, rotary embedding, activations, embedding look-up, and the write of
        keys and values.
        """
        linears_s = self.linears.total_s
        attention_s = self.attention.total_s - self.kv_write.total_s
        seconds = {
            "linears": linears_s,
            "attention": attention_s,
            "small": self.forward.total_s - linears_s - attention_s,
        }
        return {name: value / self.forward.total_s for name, value in seconds.items()}


@contextmanager
def parts_timed(decoder: Decoder) -> Iterator[Parts]:
    """Time the parts of ``decoder``'s forward pass while open."""
    parts = Parts()
    with ExitStack() as stack:
        for owner in {type(linear) for linear in decoder.weights.linears}:
            for name in {"__call__", "gated"} & set(vars(owner)):
                stack.enter_context(parts.linears.on(owner, name))
        stack.enter_context(parts.kv_write.on(KVAccess, "write"))
        stack.enter_context(parts.kv_write.on(KVWriter, "__call__"))
        stack.enter_context(parts.attention.on(PagedStep, "__call__"))
        stack.enter_context(_programs_timed(parts))
        for part, name in _FORWARD:
            stack.enter_context(parts.forward.on(part, name))
        yield parts


@contextmanager
def _programs_timed(parts: Parts) -> Iterator[None]:
    """Programs keep time themselves."""
    original = Program.run

    def run(self: Program, num_threads: int) -> None:
        begin = time.perf_counter()
        original(self, num_threads)
        elapsed_s = time.perf_counter() - begin
        for call, share in zip(self.calls, self.shares, strict=True):
            if call.loop.name in _LINEARS:
                parts.linears.total_s += elapsed_s * share
            elif call.loop.name in _ATTENTION:
                parts.attention.total_s += elapsed_s * share

    Program.run = run  # type: ignore[method-assign]
    try:
        yield
    finally:
        Program.run = original  # type: ignore[method-assign]

"""A device's memory for keys and values, which sums up its words where they lie."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from diptych.engine.backends.cuda.kernels import digests
from diptych.engine.kv.memory import DeviceKVMemory
from diptych.word_sums import LINE_WORDS, OTHER, STRIDE, Sums, Words

_TILE = 1024  # words
_NUM_TILES = 16  # of a program


class CudaKVMemory(DeviceKVMemory):
    """Sums are made on a stream of their own, beside the model's."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        super().__init__(num_bytes, device)
        self._words = self.bytes[: num_bytes // 8 * 8].view(torch.int64)
        self._stream = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._compile()

    def _compile(self) -> None:
        """All kinds of launch, so that no transfer waits for a compiler."""
        none, line = np.zeros(1, np.int64), np.full((1, 1), -1)
        self.word_sums(Words(none, none + 1, None))
        self.word_sums(Words(none, none + 1, line))
        self.word_sums(Words(none, none + 1, None, none))

    def word_sums(self, words: Words) -> list[Sums]:
        with self._launching():
            sums = add_up(self._words, words).cpu()
        return [Sums(*each) for each in sums.numpy().view(np.uint64).tolist()]

    @contextmanager
    def _launching(self) -> Iterator[None]:
        """The transfer thread has neither the model's device nor its stream."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            yield


def add_up(memory: Tensor, words: Words) -> Tensor:
    """[N, 2] int64, of the bits of :mod:`diptych.word_sums`; on the device, not waited for.

    memory: [...] int64, contiguous. What ``words`` names must lie in it.
    """
    begins, counts = (_on(memory, each) for each in (words.begins, words.counts))
    sums = memory.new_zeros(len(begins), 2)
    lines, num_lines, most = None, 0, int(words.counts.max(initial=0))
    if words.lines is not None:
        lines, num_lines = _on(memory, words.lines), words.lines.shape[1]
        most = num_lines * LINE_WORDS
    numbers = None if words.numbers is None else _on(memory, words.numbers)
    num_spans = triton.cdiv(most, _TILE * _NUM_TILES)
    if num_spans and len(begins):
        digests.add_words[(len(begins), num_spans)](
            memory,
            begins,
            counts,
            lines,
            numbers,
            sums,
            num_lines,
            stride=STRIDE,
            other=OTHER,
            line_words=LINE_WORDS,
            tile=_TILE,
            num_tiles=_NUM_TILES,
            num_warps=4,
        )
    return sums


def _on(memory: Tensor, numbers: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers)).to(memory.device)

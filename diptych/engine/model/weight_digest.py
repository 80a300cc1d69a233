"""A digest over every byte of a checkpoint's weights, made while they are loaded.

Tensors are digested on threads beside the one that loads, from the pages that it has just
read: no byte comes from the disk for the digest alone, unless other ranks load it. Such a
thread digests several GB a second, more than is loaded meanwhile. It finds accidents, and
no attack.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import xxhash

from diptych.engine.model.shard import TensorLocation

_NUM_THREADS = 2
_MAX_WAITING = 4  # tensors, whose pages stay in memory until they are digested


class WeightDigest:
    """Of one checkpoint; used by the thread that loads it, in a ``with`` block."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="weight-digest")
        self._digests: dict[str, Future[bytes]] = {}
        self._waiting: deque[Future[bytes]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def add(self, name: str, pieces: Iterable[memoryview]) -> None:
        """A tensor, whose bytes are read on another thread; waits if many are to be digested.

        name: as its file has it.
        """
        while len(self._waiting) >= _MAX_WAITING:
            self._waiting.popleft().result()
        self._digests[name] = self._threads.submit(_digest, pieces)
        self._waiting.append(self._digests[name])

    def result(self, index: Mapping[str, TensorLocation]) -> str:
        """Over every tensor's name, shape and type, and the bytes of those that were added.

        In order of their names: how they are split over files does not matter. index: all
        tensors of the checkpoint, by the names that their files have.
        """
        digest = xxhash.xxh3_128()
        for name, location in sorted(index.items()):
            digest.update(f"{name} {location.dtype} {list(location.shape)}\n".encode())
            if name in self._digests:
                digest.update(self._digests[name].result())
        return digest.hexdigest()


def _digest(pieces: Iterable[memoryview]) -> bytes:
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece)  # without the interpreter's lock
    return digest.digest()

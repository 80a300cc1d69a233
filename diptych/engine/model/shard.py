"""One safetensors file: what lies where in it, and its tensors on the file's own pages."""

import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor

FP8 = "F8_E4M3"  # means nothing without a scale
# By the names that safetensors has for them: of weights, and of all that is read.
FLOATS: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    FP8: torch.float8_e4m3fn,
}
_DTYPES = {**FLOATS, "U8": torch.uint8, "I32": torch.int32, "I64": torch.int64}


class TensorLocation(NamedTuple):
    """Where a checkpoint keeps one tensor. Offsets and sizes in bytes."""

    path: Path
    name: str  # in that file
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file
    num_bytes: int

    def rows(self, rows: range) -> "TensorLocation":
        """Where these rows of it are, of its first dimension: [len(rows), ...]."""
        row_bytes = self.num_bytes // self.shape[0]
        return self._replace(
            shape=(len(rows), *self.shape[1:]),
            offset=self.offset + rows.start * row_bytes,
            num_bytes=len(rows) * row_bytes,
        )


class FileStamp(NamedTuple):
    """Which file a name stands for, and as of when: others have others, on one host."""

    name: str
    device: int
    inode: int
    num_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, path: Path, file: Path | int) -> Self:
        """file: the same, or a descriptor of what was opened there. Raises OSError."""
        status = os.stat(file)
        return cls(path.name, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class MappedShard:
    """A file as memory: what is read of it comes from the disk, and is the system's to drop.

    Unmapped with the last tensor on it. Another file may come to have its name meanwhile.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError or ValueError: it cannot be mapped."""
        self._path = path
        with path.open("rb") as file:
            self.stamp = FileStamp.of(path, file.fileno())
            # Private, as torch takes no memory that it might not write to; nobody does.
            self._pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def has_changed(self) -> bool:
        """Whether it was written to, or its name is another file's or nobody's by now."""
        try:
            return FileStamp.of(self._path, self._path) != self.stamp
        except OSError:
            return True

    def index(self) -> Iterator[tuple[str, TensorLocation]]:
        """Every tensor of the file.

        Raises:
            ValueError, KeyError, TypeError, AttributeError, RecursionError: it is malformed.
        """
        path, num_file_bytes = self._path, len(self._pages)
        num_header_bytes = int.from_bytes(self._pages[:8], "little")
        if num_header_bytes > num_file_bytes:
            raise ValueError(f"{path.name} is not a safetensors file")
        first = 8 + num_header_bytes
        header = json.loads(self._pages[8:first])
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                sizes = [*entry["shape"], begin, end]
                if not all(type(size) is int and size >= 0 for size in sizes):
                    raise ValueError(f"in {path.name}, {name} has sizes that are no counts")
                location = TensorLocation(
                    path, name, entry["dtype"], tuple(entry["shape"]), first + begin, end - begin
                )
                if not begin <= end <= num_file_bytes - first or not _is_filled(location):
                    raise ValueError(f"{path.name} is cut short, or {name} in it is")
                yield name, location

    def pieces(self, location: TensorLocation) -> Iterator[memoryview]:
        """Its bytes, whose pages are given back behind the last one. Any thread."""
        self._advise(location, mmap.MADV_WILLNEED)
        yield memoryview(self._pages)[location.offset : location.offset + location.num_bytes]
        self.drop(location)

    def tensor(self, location: TensorLocation) -> Tensor:
        """It lies on the file's pages, which are asked for at once, and is to be read only."""
        self._advise(location, mmap.MADV_WILLNEED)
        return self.glance(location)

    def glance(self, location: TensorLocation) -> Tensor:
        """The same for one of whom little is read: each page comes when it is touched."""
        if not location.num_bytes:  # of nothing torch makes no view
            return torch.empty(location.shape, dtype=_DTYPES[location.dtype])
        flat = torch.frombuffer(
            self._pages,
            dtype=_DTYPES[location.dtype],
            count=math.prod(location.shape),
            offset=location.offset,
        )
        return flat.view(location.shape)

    def drop(self, location: TensorLocation) -> None:
        """Its pages no longer count as this process's memory; whoever reads it again may."""
        self._advise(location, mmap.MADV_DONTNEED)

    def _advise(self, location: TensorLocation, advice: int) -> None:
        begin = location.offset - location.offset % mmap.PAGESIZE
        if location.num_bytes:
            self._pages.madvise(advice, begin, location.offset + location.num_bytes - begin)


def _is_filled(location: TensorLocation) -> bool:
    """Whether it has the bytes that its shape needs; not asked of types that nobody reads."""
    dtype = _DTYPES.get(location.dtype)
    return dtype is None or location.num_bytes == math.prod(location.shape) * dtype.itemsize

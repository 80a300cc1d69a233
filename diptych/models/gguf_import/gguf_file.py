"""Reading a GGUF file: its metadata and where its tensors lie.

The public reader of the ``gguf`` package makes several numpy views per token,
which takes seconds on a large vocabulary (10 s on Gemma's 262,144); a plain
scan takes a fraction of one. The format is that of GGUF versions 2 and 3,
little-endian. Knows nothing of models.
"""

import math
import mmap
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TypeAlias

from diptych.errors import ConfigurationError

Scalar: TypeAlias = int | float | bool | str
Value: TypeAlias = Scalar | Sequence[Scalar]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 8
_STRING, _ARRAY = 8, 9
_SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"} | {
    10: "Q",
    11: "q",
    12: "d",
}


class TensorInfo(NamedTuple):
    """One tensor's place in the file. ``shape`` is in numpy's order (rows first)."""

    name: str
    shape: tuple[int, ...]
    quantization: int  # ggml's number of the element type
    offset: int  # of its first byte in the file

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class GGUFFile:
    """An open GGUF file, mapped read-only. A context manager.

    Raises:
        ConfigurationError: not a readable GGUF file; the message names it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{path}: cannot be read: {error}") from None
        self._at = 0
        try:
            self.metadata, self.tensors = self._scan()
        except (struct.error, IndexError, UnicodeDecodeError, OverflowError, MemoryError):
            self.data.close()
            raise ConfigurationError(f"{path}: the GGUF file is damaged or cut short") from None

    def __enter__(self) -> "GGUFFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(BufferError):  # an array made of it lives on in a traceback
            self.data.close()

    def string(self, key: str, default: str | None = None) -> str:
        """The metadata string ``key``; raises ConfigurationError if missing or no string."""
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """The metadata integer ``key``; raises ConfigurationError if missing or no integer."""
        value = self.metadata.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(key, "an integer")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """The metadata integer ``key``; raises ConfigurationError also if it is below 1."""
        value = self.integer(key, default)
        if value < 1:
            raise ConfigurationError(f"{self.path}: metadata {key!r} is {value}, below 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """The metadata number ``key``; raises ConfigurationError if missing or no number."""
        value = self.metadata.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(key, "a number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """The metadata flag ``key``; raises ConfigurationError if it is something else."""
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "a boolean")
        return value

    def strings(self, key: str) -> list[str]:
        """The metadata array of strings ``key``; raises ConfigurationError if it is none."""
        value = self.metadata.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "an array of strings")
        return value

    def numbers(self, key: str) -> list[float]:
        """The metadata array of numbers ``key``; raises ConfigurationError if it is none."""
        value = self.metadata.get(key)
        if not isinstance(value, tuple):
            raise self._wrong(key, "an array of numbers")
        return [float(item) for item in value]

    def _wrong(self, key: str, expected: str) -> ConfigurationError:
        found = "is missing" if key not in self.metadata else f"is not {expected}"
        return ConfigurationError(f"{self.path}: metadata {key!r} {found}")

    def _scan(self) -> tuple[dict[str, Value], list[TensorInfo]]:
        if self.data[:4] != _MAGIC:
            raise ConfigurationError(f"{self.path}: not a GGUF file")
        self._at = 4
        version = self._unpack("I")
        if version not in _VERSIONS:
            raise ConfigurationError(
                f"{self.path}: GGUF version {version} (or byte order) is not supported"
            )
        num_tensors, num_values = self._unpack("Q"), self._unpack("Q")
        metadata: dict[str, Value] = {}
        for _ in range(num_values):
            key = self._read_string()
            metadata[key] = self._read_value(self._unpack("I"))
        raw = [self._read_tensor_info() for _ in range(num_tensors)]
        self._check_once(info.name for info in raw)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise IndexError
        start = -(-self._at // alignment) * alignment
        return metadata, [info._replace(offset=start + info.offset) for info in raw]

    def _check_once(self, names: Iterable[str]) -> None:
        """Raises ConfigurationError: a tensor is there twice."""
        for name, count in Counter(names).items():
            if count > 1:
                raise ConfigurationError(f"{self.path}: tensor {name!r} is there {count} times")

    def _unpack(self, code: str) -> int:
        value: int = struct.unpack_from(f"<{code}", self.data, self._at)[0]
        self._at += struct.calcsize(f"<{code}")
        return value

    def _read_string(self) -> str:
        length = self._unpack("Q")
        end = self._at + length
        if end > len(self.data):
            raise IndexError
        text = self.data[self._at : end].decode()
        self._at = end
        return text

    def _read_value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._read_string()
        if kind != _ARRAY:
            return self._unpack(self._scalar_format(kind))
        item_kind, length = self._unpack("I"), self._unpack("Q")
        if item_kind == _STRING:
            return [self._read_string() for _ in range(length)]
        code = f"<{length}{self._scalar_format(item_kind)}"
        values = struct.unpack_from(code, self.data, self._at)
        self._at += struct.calcsize(code)
        return values

    def _scalar_format(self, kind: int) -> str:
        if kind not in _SCALAR_FORMATS:
            raise ConfigurationError(f"{self.path}: metadata type {kind} is not supported")
        return _SCALAR_FORMATS[kind]

    def _read_tensor_info(self) -> TensorInfo:
        name = self._read_string()
        num_dimensions = self._unpack("I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise IndexError
        fastest_first = [self._unpack("Q") for _ in range(num_dimensions)]
        quantization, offset = self._unpack("I"), self._unpack("Q")
        return TensorInfo(name, tuple(reversed(fastest_first)), quantization, offset)

"""The tensors of a checkpoint folder, by the names that a decoder gives them.

Knows safetensors files and how Hugging Face names tensors in larger models; what the
tensors mean is the decoder's business. Only files that the index names are opened.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from diptych.engine.model.compact import CompactWeight, FoundCompact
from diptych.engine.model.compact_file import CompactFile
from diptych.engine.model.fp8 import Fp8Weight, scales_of_rows, widen
from diptych.engine.model.rank_share import WHOLE, RankShare
from diptych.engine.model.shard import FLOATS, FP8, FileStamp, MappedShard, TensorLocation
from diptych.engine.model.stored_format import Fp8Storage, GroupedStorage, Storage
from diptych.engine.model.stored_groups import PARTS, WORDS, StoredGroups
from diptych.engine.model.weight_digest import WeightDigest
from diptych.errors import ConfigurationError

LoadProgress = Callable[[float], None]  # done ratio, 0 to 1, by bytes

_INDEX_NAME, _SINGLE_NAME = "model.safetensors.index.json", "model.safetensors"
# Where a model of text and images keeps its text part, in either order of words that
# transformers has used; and what else it consists of.
_TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
# What lies beside a weight in 8-bit floats: what to multiply it by, under either name; and
# how inputs are scaled where they are rounded as well, which ours are not.
_SCALES = ("weight_scale", "weight_scale_inv")
_INPUT_SCALES = ("input_scale", "activation_scale")
_BARE_EMBEDDING = "embed_tokens.weight"
_OTHER_PARTS = ("vision_tower.", "multi_modal_projector.")
_PIECE_NUMBERS = 1 << 22  # of two tensors, compared at a time


class CheckpointRead(NamedTuple):
    """What weights were read from, once all are."""

    digest: str  # of all weights, see :mod:`diptych.engine.model.weight_digest`; empty: not asked
    files: tuple[FileStamp, ...]  # in order of their names


NOTHING_READ = CheckpointRead("", ())


class CheckpointReader:
    """Hands out each tensor once and knows what is left."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        progress: LoadProgress,
        *,
        text_part: bool = False,
        storage: Storage | None = None,
        share: RankShare = WHOLE,
        digest: WeightDigest | None = None,
    ) -> None:
        """Tensors are handed out as ``dtype`` on ``device``.

        storage: how those of linear layers are; None: as what they are.
        share: the part of a tensor that is read where it is shared out among processes.
        digest: is given all bytes of every tensor, whatever is read of it here.
        text_part: names are those of the text part of a larger model, whose other
        parts are left out.

        Raises:
            ConfigurationError: a file is missing or malformed.
        """
        self._folder, self._dtype, self._device = folder, dtype, device
        self._progress, self._storage, self._share = progress, storage, share
        self._shards = mapped_shards(folder)
        self._index = index = tensor_index(folder, self._shards)
        self._left = dict(_of_text_part(index) if text_part else _of_whole_model(index))
        self._digest = digest
        self._pieces: dict[str, Iterator[memoryview]] = {}  # of what was read from elsewhere
        self._compact = CompactFile(folder)
        self._num_bytes = sum(location.num_bytes for location in self._left.values())
        self._num_bytes_done = 0
        self.num_compact = 0
        """Tensors that were read in compact form."""

    def take(self, name: str, *shape: int, shared_dim: int | None = None) -> Tensor:
        """A tensor of this shape, as memory of its own. Arguments and errors as of ``fill``."""
        out = torch.empty(shape, dtype=self._dtype, device=self._device)
        self.fill(name, out, shared_dim)
        return out

    def fill(self, name: str, out: Tensor, shared_dim: int | None = None) -> None:
        """Write a tensor into ``out``, which has its shape, straight from the file's pages.

        shared_dim: the dimension (0 or 1) of which ``out`` is this process's share alone.

        Raises:
            ConfigurationError: it is missing, of another shape, or no float.
        """
        if self._share.size == 1:
            shared_dim = None
        shape = list(out.shape)
        if shared_dim is not None:
            shape[shared_dim] *= self._share.size
        groups = self._groups(name, shape)
        if groups is not None:
            self._widen_groups(name, groups, out, shared_dim)
            return
        location = self._location(name, shape)
        shard = self._shards[location.path]
        if location.dtype == FP8:
            self._widen(name, shard.tensor(location), out, shared_dim)
        elif shared_dim == 0:  # other rows' pages are not even asked for
            out.copy_(shard.tensor(location.rows(self._share.part(location.shape[0]))))
        else:
            out.copy_(self._part(shard.tensor(location), shared_dim))
        self.finish(name)

    def compact(self, name: str, *shape: int) -> FoundCompact | None:
        """That a tensor of this shape has a compact form; None if it has none.

        Nor has it where it is shared out: shares may end within a block. Raises as ``fill``.
        """
        if self._share.size > 1:
            return None
        groups = self._groups(name, list(shape))
        if groups is not None:
            block_size = groups.compact_block_size
            if block_size is None:
                return None
            return FoundCompact(block_size, groups.fill_compact, pieces=None)
        location = self._location(name, list(shape))
        found = self._compact.find(name, self._shards[location.path].glance(location))
        if found is None:
            return None
        file, block_size = self._compact, found.block_size
        fill = partial(file.fill, name, block_size=block_size)
        return FoundCompact(block_size, fill, partial(file.pieces, name, block_size))

    def grouped(self, name: str, *shape: int) -> StoredGroups | None:
        """A weight of this shape as whole numbers by groups; None if it is not stored so.

        Nor is it where it is shared out: shares may end within a group. Raises as ``fill``.
        """
        return None if self._share.size > 1 else self._groups(name, list(shape))

    def fp8(self, name: str, *shape: int) -> Fp8Weight | None:
        """A weight of this shape in 8-bit floats with scales of rows, on the file's pages.

        None if it is not stored so, or its scales are not of equal parts of a row; or where it
        is shared out. Raises as ``fill``.
        """
        if self._share.size > 1 or not isinstance(self._storage, Fp8Storage):
            return None
        location = self._location(name, list(shape))
        scale = self._scale(name) if location.dtype == FP8 else None
        if scale is None:
            return None
        block, (num_rows, num_columns) = self._storage.block, shape
        try:
            scales = scales_of_rows(scale.float(), num_rows, num_columns, block)
        except ValueError:  # which whoever fills with it is told
            return None
        if scales.shape[1] > 1 and (block is None or num_columns % block[1]):
            return None
        return Fp8Weight(self._shards[location.path].tensor(location), scales)

    def fill_compact(self, name: str, found: FoundCompact, out: CompactWeight) -> None:
        """Write what was found of a tensor into ``out``, instead of the tensor."""
        found.fill(out)
        if found.pieces is not None:
            self._pieces[name] = found.pieces()
        self.num_compact += 1
        self.finish(name)

    def finish(self, name: str) -> None:
        """Of a weight all has been read that it is stored as."""
        location = self._left.get(name)
        names = [name]
        if location is None:
            names = [name.removesuffix("weight") + part for part in PARTS]
        elif location.dtype == FP8:
            stem = name.removesuffix("weight")
            names += [stem + part for part in (*_SCALES, *_INPUT_SCALES)]
        for part in names:
            self.skip(part)

    def differ(self, name: str, other: str, num_rows: int, num_columns: int) -> bool:
        """Whether both are there, the other one is of this shape, and they are not the same.

        As floats of the type that they are handed out in, and of the rows that are this
        process's: a piece at a time, of which no more than that is ever in memory.
        """
        shape = (num_rows, num_columns)
        found = [self._stored(each) for each in (name, other)]
        locations = [location for location in found if location is not None]
        if len(locations) < 2 or (locations[1].dtype in FLOATS and locations[1].shape != shape):
            return False
        are_floats = all(each.dtype in FLOATS and each.shape == shape for each in locations)
        if not are_floats or len({each.dtype == FP8 for each in locations}) > 1:
            return True
        rows, step = self._share.part(num_rows), max(1, _PIECE_NUMBERS // num_columns)
        parts = (rows[first : first + step] for first in range(0, len(rows), step))
        return not all(self._are_equal(each.rows(part) for each in locations) for part in parts)

    def _are_equal(self, locations: Iterable[TensorLocation]) -> bool:
        """Of two small ones, whose pages are given back."""
        pieces = [(self._shards[location.path], location) for location in locations]
        one, other = (shard.tensor(location).to(self._dtype) for shard, location in pieces)
        are_equal = torch.equal(one, other)
        for shard, location in pieces:
            shard.drop(location)
        return are_equal

    def _stored(self, name: str) -> TensorLocation | None:
        """The weight, or the words that it is stored as."""
        return self._left.get(name) or self._left.get(name.removesuffix("weight") + WORDS)

    def skip_zeros(self, name: str) -> None:
        """Leave out a bias that is there for whoever packed the weight, if it changes nothing."""
        location = self._left.get(name)
        if not isinstance(self._storage, GroupedStorage) or location is None:
            return
        if location.dtype in FLOATS and not self._shards[location.path].tensor(location).any():
            self.skip(name)

    def _groups(self, name: str, shape: list[int]) -> StoredGroups | None:
        """A weight as whole numbers; None if it is not stored so."""
        stem = name.removesuffix("weight")
        if not isinstance(self._storage, GroupedStorage) or stem + WORDS not in self._left:
            return None
        locations = {part: self._left[stem + part] for part in PARTS if stem + part in self._left}
        try:
            parts = {
                part: self._shards[location.path].glance(location)
                for part, location in locations.items()
            }
            return StoredGroups.of(parts, shape, self._storage)
        except (KeyError, ValueError) as error:
            reason = (
                f"{error} is no type of whole numbers" if isinstance(error, KeyError) else error
            )
            raise ConfigurationError(f"{name} in {self._folder}: {reason}") from None

    def _widen_groups(
        self, name: str, groups: StoredGroups, out: Tensor, shared_dim: int | None
    ) -> None:
        if shared_dim is None:
            groups.widen(out)
        else:  # groups do not end where shares do
            whole = out.new_empty(groups.shape)
            groups.widen(whole)
            out.copy_(self._part(whole, shared_dim))
        self.finish(name)

    def _location(self, name: str, shape: list[int]) -> TensorLocation:
        location = self._left.get(name)
        if location is None:
            raise ConfigurationError(f"{self._folder} lacks the tensor {name}")
        if list(location.shape) != shape:
            raise ConfigurationError(
                f"{name} in {self._folder} is {list(location.shape)}, expected {shape}"
            )
        if location.dtype not in FLOATS:
            raise ConfigurationError(f"{name} in {self._folder} is {location.dtype}, not a float")
        return location

    def _scale(self, name: str) -> Tensor | None:
        """What lies beside a weight to multiply it by; on the file's pages."""
        stem = name.removesuffix("weight")
        scale_name = next((stem + s for s in _SCALES if stem + s in self._left), None)
        if scale_name is None:
            return None
        location = self._location(scale_name, list(self._left[scale_name].shape))
        return self._shards[location.path].glance(location)

    def _part(self, whole: Tensor, shared_dim: int | None) -> Tensor:
        """A view of this process's share."""
        if shared_dim is None:
            return whole
        part = self._share.part(whole.shape[shared_dim])
        return whole.narrow(shared_dim, part.start, len(part))

    def _widen(self, name: str, stored: Tensor, out: Tensor, shared_dim: int | None) -> None:
        scale = self._scale(name)
        if not isinstance(self._storage, Fp8Storage) or scale is None or stored.dim() != 2:
            raise ConfigurationError(
                f"{name} in {self._folder} is {FP8}, without a scale or a quantization_config"
            )
        try:
            if shared_dim is None:
                widen(stored, scale, self._storage.block, out)
            else:  # scales do not end where shares do
                whole = out.new_empty(stored.shape)
                widen(stored, scale, self._storage.block, whole)
                out.copy_(self._part(whole, shared_dim))
        except ValueError as error:
            raise ConfigurationError(f"{name} in {self._folder}: {error}") from None

    def skip(self, name: str) -> None:
        """Leave out a tensor that may be there and is not needed, or no longer."""
        location = self._left.pop(name, None)
        if location is None:
            return
        shard, pieces = self._shards[location.path], self._pieces.pop(name, None)
        if self._digest is None or pieces is not None:
            shard.drop(location)
        if self._digest is not None:
            self._digest.add(location.name, pieces or shard.pieces(location))
        self._num_bytes_done += location.num_bytes
        self._progress(self._num_bytes_done / self._num_bytes)

    def close(self) -> CheckpointRead:
        """Raises ConfigurationError: something is left, so this is another model; or files are
        no longer those that were read, of which some may have been others'.
        """
        if self._left:
            some = ", ".join(sorted(self._left)[:3])
            raise ConfigurationError(
                f"{self._folder} has {len(self._left)} tensors this decoder does not use: {some}"
            )
        digest = "" if self._digest is None else self._digest.result(self._index)
        shards = [shard for _, shard in sorted(self._shards.items())]
        if any(shard.has_changed() for shard in shards):
            raise ConfigurationError(
                f"{self._folder} changed while its weights were read: start again"
            )
        return CheckpointRead(digest, tuple(shard.stamp for shard in shards))


def mapped_shards(folder: Path) -> dict[Path, MappedShard]:
    """The files of the checkpoint in ``folder``, one or several.

    Raises:
        ConfigurationError: a file is missing or malformed, or there are two checkpoints.
    """
    try:
        if (folder / _INDEX_NAME).exists():
            weight_map = json.loads((folder / _INDEX_NAME).read_text("utf-8"))["weight_map"]
            names = sorted(set(weight_map.values()))
            for name in map(Path, names):
                if name.is_absolute() or ".." in name.parts:
                    raise ValueError(f"{_INDEX_NAME} names {str(name)!r}, which is not in there")
        else:
            names = [_SINGLE_NAME]
        if _SINGLE_NAME not in names and (folder / _SINGLE_NAME).exists():
            raise ConfigurationError(
                f"{folder} has both {_SINGLE_NAME} and {_INDEX_NAME}, which does not name it: "
                "remove one of them"
            )
        return {folder / name: MappedShard(folder / name) for name in names}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigurationError(f"cannot read the weights in {folder}: {error}") from error


def tensor_index(folder: Path, shards: Mapping[Path, MappedShard]) -> dict[str, TensorLocation]:
    """Every tensor of a checkpoint, of these files of ``folder``.

    Raises:
        ConfigurationError: one is malformed.
    """
    index: dict[str, TensorLocation] = {}
    try:
        for shard in shards.values():
            index.update(shard.index())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigurationError(f"cannot read the weights in {folder}: {error}") from error
    return index


def _of_text_part(index: Mapping[str, TensorLocation]) -> dict[str, TensorLocation]:
    """The text part's tensors, by the names that they would have in a model of text alone."""
    part: dict[str, TensorLocation] = {}
    for name, location in index.items():
        prefix = next((prefix for prefix in _TEXT_PREFIXES if name.startswith(prefix)), None)
        if prefix is not None:
            part[_TEXT_PREFIXES[prefix] + name.removeprefix(prefix)] = location
        elif not name.removeprefix("model.").startswith(_OTHER_PARTS):
            part[name] = location
    return part


def _of_whole_model(index: dict[str, TensorLocation]) -> dict[str, TensorLocation]:
    """A decoder's tensors by the names that they have in a model with a head.

    Where AutoModel has saved it alone, as that of Qwen3-Embedding, nothing stands before them.
    """
    if _BARE_EMBEDDING not in index or any(name.startswith("model.") for name in index):
        return index
    return {
        name if name.startswith("lm_head.") else f"model.{name}": location
        for name, location in index.items()
    }

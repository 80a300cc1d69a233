"""Weights stored as whole numbers by groups (GPTQ, AWQ): what they stand for.

A number of a weight is ``scale * (number - zero)``, where scale and zero are its group's. Of an
output all groups are consecutive inputs, or those that the checkpoint says (``g_idx``).
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Self

import torch
from torch import Tensor

from diptych.engine.model.compact import CompactWeight
from diptych.engine.model.grouped import GroupedWeight
from diptych.engine.model.stored_format import GroupedStorage, Packing
from diptych.models.compact import BLOCK_SIZES, HEAD_BYTES

_CHUNK_ELEMENTS = 1 << 20  # unpacked at a time, so that little lies beside the result
# Where in a word AWQ has each of eight columns, in fours of bits.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
WORDS, ZEROS, SCALES, GROUPS = PARTS = ("qweight", "qzeros", "scales", "g_idx")


class GroupedRows(NamedTuple):
    """Some rows of a weight, unpacked."""

    begin: int  # the first one's number
    numbers: Tensor  # [num_rows, num_columns] uint8
    zeros: Tensor  # [num_rows, num_groups] int16
    scales: Tensor  # [num_rows, num_groups] float32


class StoredGroups(NamedTuple):
    """One layer's weight, on its file's pages."""

    words: Tensor  # int32; GPTQ: [packed columns, rows], AWQ: [columns, packed rows]
    zeros: Tensor  # [num_groups, packed rows] int32
    scales: Tensor  # [num_groups, num_rows], a float
    group_of: Tensor | None  # [num_columns] int64; None: groups are consecutive columns
    group_size: int  # columns
    storage: GroupedStorage

    @classmethod
    def of(cls, parts: Mapping[str, Tensor], shape: list[int], storage: GroupedStorage) -> Self:
        """parts: by the last part of their names; shape: [num_rows, num_columns] of the weight.

        Raises:
            ValueError: one is missing, of another shape or type, or says what cannot be.
        """
        num_rows, num_columns = shape
        group_size = storage.group_size or num_columns
        wanted = _shapes(num_rows, num_columns, -(-num_columns // group_size), storage)
        for name, (part_shape, dtypes) in wanted.items():
            part = parts.get(name)
            if part is None and name == GROUPS:
                continue
            if part is None:
                raise ValueError(f"{name} is missing")
            if list(part.shape) != part_shape or part.dtype not in dtypes:
                raise ValueError(f"{name} is {part.dtype} {list(part.shape)}, not {part_shape}")
        groups = _groups(parts.get(GROUPS), num_columns, group_size)
        return cls(parts[WORDS], parts[ZEROS], parts[SCALES], groups, group_size, storage)

    @property
    def shape(self) -> tuple[int, int]:
        """[num_rows, num_columns] of the weight."""
        per_word = 32 // self.storage.bits
        is_awq = self.storage.packing is Packing.AWQ
        return self.scales.shape[1], len(self.words) * (1 if is_awq else per_word)

    def chunks(self, device: torch.device) -> Iterator[GroupedRows]:
        """All rows, in order, a few at a time; unpacked on the device."""
        num_rows, num_columns = self.shape
        per_word = 32 // self.storage.bits
        step = max(1, _CHUNK_ELEMENTS // num_columns // per_word) * per_word
        for begin in range(0, num_rows, step):
            end = min(begin + step, num_rows)
            packed = slice(begin // per_word, end // per_word)
            zeros = self._unpacked(self.zeros[:, packed].to(device), is_zeros=True)
            if self.storage.packing is Packing.AWQ:
                numbers = self._unpacked(self.words[:, packed].to(device))
            else:
                words = self.words[:, begin:end].to(device)
                numbers = self._unpacked(words.t()).t()
            scales = self.scales[:, begin:end].to(device, torch.float32)
            yield GroupedRows(
                begin,
                numbers.to(torch.uint8).t().contiguous(),
                zeros.to(torch.int16).t().contiguous(),
                scales.t().contiguous(),
            )

    def _unpacked(self, words: Tensor, *, is_zeros: bool = False) -> Tensor:
        """[..., n] int32 -> [..., n * numbers of a word]."""
        bits, packing = self.storage.bits, self.storage.packing
        places = _AWQ_PLACES if packing is Packing.AWQ else range(32 // bits)
        if is_zeros and packing is Packing.GPTQ:
            # As they were taken away, from whole words: what was borrowed comes back.
            words = words.long() + sum(1 << bits * place for place in places)
        shifts = torch.tensor([bits * place for place in places], device=words.device)
        numbers = words[..., None] >> shifts.to(words.dtype)
        return (numbers & ((1 << bits) - 1)).flatten(-2)

    def widen(self, out: Tensor) -> None:
        """out = the weight, in float32 and then rounded. [num_rows, num_columns]."""
        group_of = self.group_of
        if group_of is None:
            group_of = torch.arange(out.shape[1]) // self.group_size
        group_of = group_of.to(out.device)
        for rows in self.chunks(out.device):
            numbers = rows.numbers.float()
            numbers -= rows.zeros.float().index_select(1, group_of)
            numbers *= rows.scales.index_select(1, group_of)
            out[rows.begin : rows.begin + len(numbers)] = numbers

    @property
    def compact_block_size(self) -> int | None:
        """Of a compact weight that stands for the same; None: none does."""
        num_columns = self.shape[1]
        sizes = [size for size in BLOCK_SIZES if num_columns % size == self.group_size % size == 0]
        if self.group_of is not None or not sizes or not self._fits_bytes():
            return None
        return max(sizes)

    def _fits_bytes(self) -> bool:
        """Whether numbers less their zeros are signed bytes."""
        if self.storage.bits < 8:
            return True
        return bool((self._unpacked(self.zeros, is_zeros=True) == 128).all())

    def fill_compact(self, out: CompactWeight) -> None:
        """Write it in blocks; there must be a compact form of such."""
        num_rows, num_columns = self.shape
        blocks = out.memory.view(num_rows, -1, HEAD_BYTES + out.block_size)
        num_groups = self.scales.shape[0]
        group_of = torch.arange(0, num_columns, out.block_size) // self.group_size
        heads = torch.zeros(num_rows, num_groups, 2)
        heads[..., 0] = self.scales.t()
        blocks[..., :HEAD_BYTES] = heads[:, group_of].view(torch.uint8)
        for rows in self.chunks(out.device):
            numbers = rows.numbers.view(len(rows.numbers), len(group_of), -1).to(torch.int16)
            numbers = (numbers - rows.zeros[:, group_of, None]).to(torch.int8)
            end = rows.begin + len(numbers)
            blocks[rows.begin : end, :, HEAD_BYTES:] = numbers.view(torch.uint8)

    @property
    def has_even_groups(self) -> bool:
        """Whether each has as many columns as any other; they may be anywhere."""
        if self.group_of is None:
            return self.shape[1] % self.group_size == 0
        return bool((self.group_of.bincount() == self.group_size).all())

    @property
    def order(self) -> Tensor | None:
        """[num_columns], the columns group by group; None: they lie so."""
        return None if self.group_of is None else self.group_of.argsort(stable=True)

    def fill_grouped(self, out: GroupedWeight) -> None:
        """Write it, its columns group by group; groups must be even."""
        order = self.order if self.order is None else self.order.to(out.numbers.device)
        for rows in self.chunks(out.numbers.device):
            part = out.rows(rows.begin, rows.begin + len(rows.numbers))
            part.pack(rows.numbers if order is None else rows.numbers[:, order])
            assert part.zeros is not None
            part.zeros.copy_(rows.zeros)
            part.scales.copy_(rows.scales)


def _shapes(
    num_rows: int, num_columns: int, num_groups: int, storage: GroupedStorage
) -> Mapping[str, tuple[list[int], tuple[torch.dtype, ...]]]:
    """Of the parts of a weight; ValueError if such a weight is not packed at all."""
    per_word = 32 // storage.bits
    is_awq = storage.packing is Packing.AWQ
    if num_rows % per_word or (not is_awq and num_columns % per_word):
        raise ValueError(f"{[num_rows, num_columns]} is not a whole number of words")
    words = [num_columns, num_rows // per_word]
    if not is_awq:
        words = [num_columns // per_word, num_rows]
    return {
        WORDS: (words, (torch.int32,)),
        ZEROS: ([num_groups, num_rows // per_word], (torch.int32,)),
        SCALES: ([num_groups, num_rows], (torch.float16, torch.bfloat16, torch.float32)),
        GROUPS: ([num_columns], (torch.int32, torch.int64)),
    }


def _groups(stored: Tensor | None, num_columns: int, group_size: int) -> Tensor | None:
    if stored is None:
        return None
    consecutive = torch.arange(num_columns) // group_size
    groups = stored.long()
    if torch.equal(groups, consecutive):
        return None
    if not 0 <= int(groups.min()) <= int(groups.max()) <= int(consecutive[-1]):
        raise ValueError(f"{GROUPS} names groups that there are not")
    return groups

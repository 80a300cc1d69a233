"""Weights of one layer or several, one under another, as the store keeps them best.

As small numbers by groups or in 8-bit floats if all of them are stored so and the store
multiplies such; in compact form if all of them have one; else as floats.
"""

from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from diptych.engine.model.checkpoint import CheckpointReader
from diptych.engine.model.compact import Weight
from diptych.engine.model.fp8 import Fp8Weight
from diptych.engine.model.grouped import GroupedWeight, GroupFormat, Numbers
from diptych.engine.model.parts import Fp8Store, GroupedStore, Linear, WeightStore
from diptych.engine.model.stored_groups import StoredGroups


class _Place(NamedTuple):
    """Of one tensor within what is joined: rows from begin to end."""

    name: str
    begin: int
    end: int


def read_linear(
    reader: CheckpointReader,
    store: WeightStore,
    rows: Mapping[str, int],
    num_columns: int,
    bias: Tensor | None = None,
    shared_dim: int = 0,
) -> Linear:
    """Of these tensors, of so many rows each, and a bias of all rows.

    Raises:
        ConfigurationError: one is missing or of another shape, or not taken by the store.
    """
    if store.grouped is not None:
        weight = _read_grouped(reader, store.grouped, rows, num_columns)
        if weight is None:
            weight = _read_grouped_fp8(reader, store.grouped, rows, num_columns)
        if weight is not None:
            return store.grouped.linear(weight, bias)
    if store.fp8 is not None:
        fp8 = _read_fp8(reader, store.fp8, rows, num_columns)
        if fp8 is not None:
            return store.fp8.linear(fp8, bias)
    return store.linear(read_weight(reader, store, rows, num_columns, shared_dim), bias)


def read_weight(
    reader: CheckpointReader,
    store: WeightStore,
    rows: Mapping[str, int],
    num_columns: int,
    shared_dim: int = 0,
) -> Weight:
    """These tensors, of so many rows each. Raises as ``read_linear``."""
    places = _places(rows)
    num_rows = places[-1].end
    parts = [reader.compact(name, size, num_columns) for name, size in rows.items()]
    found = [part for part in parts if part is not None]
    if len(found) == len(parts):
        block_size = min(part.block_size for part in found)
        compact = store.allocate_compact(num_rows, num_columns, block_size)
        if compact is not None:
            for (name, begin, end), part in zip(places, found, strict=True):
                reader.fill_compact(name, part, compact.rows(begin, end))
            return compact
    weight = store.allocate(num_rows, num_columns)
    for name, begin, end in places:
        reader.fill(name, weight[begin:end], shared_dim)
    return weight


def _read_grouped(
    reader: CheckpointReader, store: GroupedStore, rows: Mapping[str, int], num_columns: int
) -> GroupedWeight | None:
    parts = [reader.grouped(name, size, num_columns) for name, size in rows.items()]
    found = [part for part in parts if part is not None]
    if len(found) < len(parts) or not _go_together(found):
        return None
    places, first = _places(rows), found[0]
    kind = GroupFormat(places[-1].end, num_columns, Numbers(first.storage.bits), first.group_size)
    weight = store.allocate(kind)
    if weight is None:
        return None
    for (name, begin, end), part in zip(places, found, strict=True):
        part.fill_grouped(weight.rows(begin, end))
        reader.finish(name)
    order = first.order
    return weight if order is None else weight._replace(order=order.to(weight.numbers.device))


def _read_grouped_fp8(
    reader: CheckpointReader, store: GroupedStore, rows: Mapping[str, int], num_columns: int
) -> GroupedWeight | None:
    parts = [reader.fp8(name, size, num_columns) for name, size in rows.items()]
    found = [part for part in parts if part is not None]
    counts = {part.scales.shape[1] for part in found}
    if len(found) < len(parts) or len(counts) > 1 or not all(part.is_finite() for part in found):
        return None
    places = _places(rows)
    group_size = num_columns // counts.pop()
    weight = store.allocate(GroupFormat(places[-1].end, num_columns, Numbers.FP8, group_size))
    if weight is None:
        return None
    for (name, begin, end), part in zip(places, found, strict=True):
        to = weight.rows(begin, end)
        to.pack(part.numbers.view(torch.uint8))
        to.scales.copy_(part.scales)
        reader.finish(name)
    return weight


def _read_fp8(
    reader: CheckpointReader, store: Fp8Store, rows: Mapping[str, int], num_columns: int
) -> Fp8Weight | None:
    parts = [reader.fp8(name, size, num_columns) for name, size in rows.items()]
    found = [part for part in parts if part is not None]
    if len(found) < len(parts) or any(part.scales.shape[1] > 1 for part in found):
        return None
    places = _places(rows)
    weight = store.allocate(places[-1].end, num_columns)
    for (name, begin, end), part in zip(places, found, strict=True):
        for target, source in zip(weight.rows(begin, end), part, strict=True):
            target.copy_(source)
        reader.finish(name)
    return weight


def _go_together(parts: list[StoredGroups]) -> bool:
    """Whether inputs come to all of them in the same order, group by group."""
    first = parts[0].group_of
    if first is None:
        return all(part.group_of is None for part in parts)
    are_equal = all(
        part.group_of is not None and torch.equal(part.group_of, first) for part in parts
    )
    return are_equal and parts[0].has_even_groups


def _places(rows: Mapping[str, int]) -> list[_Place]:
    ends = accumulate(rows.values())
    return [_Place(name, end - rows[name], end) for name, end in zip(rows, ends, strict=True)]

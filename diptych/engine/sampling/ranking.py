"""The largest logits of each row. On the model thread."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Ranked(NamedTuple):
    """Of each row: the largest logits, falling, and their ids; equal ones by rising id."""

    values: NDArray[np.float64]  # [R, count]
    ids: NDArray[np.int64]  # [R, count]


class LargestLogits(NamedTuple):
    """Of each row, where the logits are; equal ones in any order."""

    values: Tensor  # [R, count] float64
    ids: Tensor  # [R, count] int64


def ranked(logits: Tensor, count: int) -> Ranked:
    """The ``count`` largest; which of those that equal the last is not said."""
    found = largest(logits, count)
    return in_order(found.values.cpu(), found.ids.cpu())


def largest(logits: Tensor, count: int) -> LargestLogits:
    """The ``count`` largest; nobody waits for them."""
    if count == logits.shape[1]:
        top = torch.sort(logits, dim=-1, descending=True, stable=True)
        return LargestLogits(top.values.double(), top.indices)
    values, ids = torch.topk(logits, count)
    return LargestLogits(values.double(), ids)


def in_order(on_host: Tensor, ids_on_host: Tensor) -> Ranked:
    """The same, ranked. Falling already, but for the order of equal ones: [R, count]."""
    values, ids = on_host.numpy(), ids_on_host.numpy()
    if (values[:, 1:] == values[:, :-1]).any():
        order = np.lexsort((ids, -values), axis=-1)
        values, ids = np.take_along_axis(values, order, 1), np.take_along_axis(ids, order, 1)
    return Ranked(values, ids)

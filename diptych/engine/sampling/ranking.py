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


def ranked(logits: Tensor, count: int) -> Ranked:
    """The ``count`` largest; which of those that equal the last is not said."""
    if count == logits.shape[1]:
        every = torch.sort(logits, dim=-1, descending=True, stable=True)
        return Ranked(every.values.double().cpu().numpy(), every.indices.cpu().numpy())
    top = torch.topk(logits, count)
    values, ids = top.values.double().cpu().numpy(), top.indices.cpu().numpy()
    if (values[:, 1:] == values[:, :-1]).any():
        order = np.lexsort((ids, -values), axis=-1)
        values, ids = np.take_along_axis(values, order, 1), np.take_along_axis(ids, order, 1)
    return Ranked(values, ids)

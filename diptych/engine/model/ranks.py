"""Layers whose weights several processes share out, and what these tell each other for it.

Each rank computes the same operations in the same order on the same rows, each with its
part of the weights (Megatron-LM's way: Shoeybi et al. 2019). Model thread only.
"""

from typing import Protocol

from torch import Tensor

from diptych.engine.model.compact import Weight, rows_of
from diptych.engine.model.parts import Linear
from diptych.engine.model.rank_share import WHOLE, RankShare


class Ranks(Protocol):
    """All ranks, as one of them sees them. A call returns when all ranks have made it.

    Raises DeviceLostError: one of them is gone.
    """

    @property
    def share(self) -> RankShare: ...

    def sum(self, x: Tensor) -> None:
        """x becomes the sum of what each rank gave, the same bits in all of them."""
        ...

    def share_first(self, x: Tensor) -> None:
        """x becomes rank 0's, bit for bit. x: contiguous."""
        ...

    def gather(self, part: Tensor) -> Tensor:
        """In rank 0 all ranks' columns beside each other: [num_rows, size * num_columns].

        The others get [0, size * num_columns]. part: [num_rows, num_columns].
        """
        ...


class OneRank:
    """A process that has all. Implements ``Ranks``."""

    share = WHOLE

    def sum(self, x: Tensor) -> None:
        """It is the sum."""

    def share_first(self, x: Tensor) -> None:
        """It is rank 0's."""

    def gather(self, part: Tensor) -> Tensor:
        return part


class SummedLinear:
    """Of a weight whose columns are shared out. Implements ``Linear``."""

    def __init__(self, part: Linear, ranks: Ranks) -> None:
        """part: this rank's columns. A bias is rank 0's alone: it would be added more than once."""
        self._part, self._ranks = part, ranks
        self.in_features, self.out_features = part.in_features, part.out_features

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x: this rank's columns, [num_rows, in_features]."""
        y = self._part(x, out)
        self._ranks.sum(y)
        return y


class GatheredLinear:
    """Of a weight whose rows are shared out, and wanted in rank 0. Implements ``Linear``."""

    def __init__(self, part: Linear, ranks: Ranks) -> None:
        """part: this rank's rows."""
        self._part, self._ranks = part, ranks
        self.in_features = part.in_features
        self.out_features = part.out_features * ranks.share.size

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[num_rows, out_features] in rank 0, and no rows in the others."""
        y = self._ranks.gather(self._part(x))
        return y if out is None else out.copy_(y)


def look_up(token_ids: Tensor, embedding: Weight, ranks: Ranks) -> Tensor:
    """Rows of an embedding whose rows are shared out. token_ids: [N] -> [N, hidden_size].

    Exact: of each row all ranks but one give zeros.
    """
    if ranks.share.size == 1:
        return rows_of(embedding, token_ids)
    num_rows = embedding.shape[0]
    own = token_ids - ranks.share.rank * num_rows
    is_elsewhere = (own < 0) | (own >= num_rows)
    x = rows_of(embedding, own.masked_fill_(is_elsewhere, 0))
    x.masked_fill_(is_elsewhere[:, None], 0)
    ranks.sum(x)
    return x


ONE_RANK = OneRank()

"""Block tables that stay on the device: of each step only what is other than before is sent."""

import numpy as np
import torch
from numpy.typing import NDArray

from diptych.engine.device_copies import Send

_UNKNOWN = -1  # no block's id


class DeviceTables:
    """One table for each row of a batch. Model thread.

    Invariant: where the mirror has a block's id, the device has it too, or will before what it is
    asked for next.
    """

    def __init__(
        self,
        num_rows: int,
        num_columns: int,
        device: torch.device,
        send: Send = torch.from_numpy,
    ) -> None:
        """Columns: the most blocks of a row."""
        self.tensor = torch.zeros(num_rows, num_columns, dtype=torch.int64, device=device)
        self._send = send
        self.num_sent = 0  # ids, so far
        self._mirror = np.full((num_rows, num_columns), _UNKNOWN)

    def have_room_for(self, shape: tuple[int, ...]) -> bool:
        """Of tables: [num_rows, width]."""
        num_rows, width = shape
        return num_rows <= len(self._mirror) and width <= self._mirror.shape[1]

    def update(self, tables: NDArray[np.int64], num_blocks: NDArray[np.int64]) -> None:
        """Make the first rows these, up to as many blocks as each has; nobody waits for it.

        tables: [num_rows, width], no larger than there is room; num_blocks: [num_rows].
        """
        num_rows, width = tables.shape
        mirror = self._mirror[:num_rows, :width]
        rows, columns = np.nonzero((mirror != tables) & (np.arange(width) < num_blocks[:, None]))
        if not len(rows):
            return
        ids = tables[rows, columns]
        places = rows * self.tensor.shape[1] + columns
        mirror[rows, columns] = _UNKNOWN  # should what follows break off
        sent = self._send(np.stack((places, ids)))
        self.tensor.view(-1).index_copy_(0, sent[0], sent[1])
        mirror[rows, columns] = ids
        self.num_sent += len(ids)

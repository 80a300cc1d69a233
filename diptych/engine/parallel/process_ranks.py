"""What the processes of one engine tell each other within a step, by torch.distributed.

gloo, over the machine's own loopback: nobody else can reach it. Model thread only.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor

from diptych.engine.model.rank_share import RankShare
from diptych.errors import DeviceLostError

# Of one call, far beyond any step: what bounds a step is the watch over the model thread.
_CALL_S = 600.0

# Its types do not tell of what is used here.
_distributed: Any = torch.distributed


class _Work(Protocol):
    def wait(self) -> object: ...


class _Group(Protocol):
    """What is used of a process group."""

    def allreduce(self, tensors: list[Tensor]) -> _Work: ...
    def gather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], options: object
    ) -> _Work: ...


class ProcessRanks:
    """Implements ``Ranks``, one for each process."""

    def __init__(self, share: RankShare, meeting_file: Path) -> None:
        """Returns when all ranks have come to the same file. Raises DeviceLostError."""
        self.share = share
        with _telling_of_the_lost():
            self._group = _gloo(share, meeting_file)

    def sum(self, x: Tensor) -> None:
        with _telling_of_the_lost():
            self._group.allreduce([x]).wait()

    def gather(self, part: Tensor) -> Tensor:
        is_first = self.share.rank == 0
        parts = [torch.empty_like(part) for _ in range(self.share.size)] if is_first else []
        options = _distributed.GatherOptions()
        options.rootRank = 0
        with _telling_of_the_lost():
            self._group.gather([parts] if is_first else [], [part], options).wait()
        if is_first:
            return torch.cat(parts, 1)
        return part.new_empty(0, part.shape[1] * self.share.size)

    def meet(self) -> None:
        """Return when all ranks have come here: what they did before is done."""
        self.sum(torch.zeros(1))


def _gloo(share: RankShare, meeting_file: Path) -> _Group:
    kind = _distributed.ProcessGroupGloo
    # Private, but the only way to choose the address: by itself gloo listens on the one that
    # the machine's name stands for.
    options = kind._Options()
    options._devices = [kind.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=_CALL_S)
    store = _distributed.FileStore(str(meeting_file), share.size)
    group: _Group = kind(store, share.rank, share.size, options)
    return group


@contextmanager
def _telling_of_the_lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise DeviceLostError(f"a rank is lost: {error}") from error

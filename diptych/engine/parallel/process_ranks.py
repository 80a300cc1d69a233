"""What the processes of one engine tell each other within a step, by torch.distributed.

gloo between hosts' memory, over the machine's own loopback, where nobody else can reach it; nccl
between GPUs. Both are asked in the same way. Model thread only.
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
from diptych.errors import ConfigurationError, DeviceLostError

# Of one call, far beyond any step: what bounds a step is the watch over the model thread.
_CALL_S = 600.0

# Its types do not tell of what is used here.
_distributed: Any = torch.distributed

_HOST = torch.device("cpu")


class _Work(Protocol):
    def wait(self) -> object: ...


class _Group(Protocol):
    """What is used of a process group."""

    def allreduce(self, tensors: list[Tensor]) -> _Work: ...
    def broadcast(self, tensors: list[Tensor], options: object) -> _Work: ...
    def gather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], options: object
    ) -> _Work: ...


class ProcessRanks:
    """Implements ``Ranks``, one for each process.

    On GPUs a call returns when the device was asked, and what it is asked for next comes behind.
    """

    def __init__(self, share: RankShare, meeting_file: Path, device: torch.device = _HOST) -> None:
        """Returns when all ranks have come to the same file, and found each other; between hosts
        none needs it any more. device: where what they tell lies.

        Raises DeviceLostError; ConfigurationError: this torch has no nccl.
        """
        self.share = share
        with _telling_of_the_lost():
            store = _distributed.FileStore(str(meeting_file), share.size)
            self._hosts = _gloo(share, store)
            self._group = self._hosts if device.type == "cpu" else _nccl(share, store, device)
            _until_all_come(self._hosts)

    def sum(self, x: Tensor) -> None:
        with _telling_of_the_lost():
            self._group.allreduce([x]).wait()

    def share_first(self, x: Tensor) -> None:
        options = _distributed.BroadcastOptions()
        options.rootRank = 0
        with _telling_of_the_lost():
            self._group.broadcast([x.view(torch.uint8)], options).wait()

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
        """Return when all ranks have come here: what they did before is done.

        On GPUs what each has waited for, as it is told between hosts.
        """
        with _telling_of_the_lost():
            _until_all_come(self._hosts)


def _until_all_come(hosts: _Group) -> None:
    hosts.allreduce([torch.zeros(1)]).wait()


def _gloo(share: RankShare, store: Any) -> _Group:
    kind = _distributed.ProcessGroupGloo
    # Private, but the only way to choose the address: by itself gloo listens on the one that
    # the machine's name stands for.
    options = kind._Options()
    options._devices = [kind.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=_CALL_S)
    group: _Group = kind(_distributed.PrefixStore("gloo", store), share.rank, share.size, options)
    return group


def _nccl(share: RankShare, store: Any, device: torch.device) -> _Group:
    if not _distributed.is_nccl_available():
        raise ConfigurationError("tensor_parallel: this torch was built without nccl")
    kind = _distributed.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timedelta(seconds=_CALL_S)
    torch.cuda.set_device(device)
    group: _Group = kind(_distributed.PrefixStore("nccl", store), share.rank, share.size, options)
    return group


@contextmanager
def _telling_of_the_lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise DeviceLostError(f"a rank is lost: {error}") from error

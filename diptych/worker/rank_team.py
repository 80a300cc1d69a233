"""The other ranks of a worker whose model several processes share out. On the model thread."""

import logging
import os
import socket
import subprocess
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import NamedTuple

import torch

from diptych.child_process import module_command
from diptych.engine.kv.memory import MappedKVMemory
from diptych.engine.parallel.process_ranks import ProcessRanks
from diptych.errors import ConfigurationError, DeviceLostError
from diptych.own_folder import OwnFolder
from diptych.worker.rank_setup import RankSetup, RankWord, hear_word, send

logger = logging.getLogger(__name__)

_HOST = torch.device("cpu")
_TURN_S = 0.1  # between two looks at whether loading was given up


class RankProcess(NamedTuple):
    """One of them; ``link`` is this process's end of what they say to each other."""

    rank: int
    process: "subprocess.Popen[bytes]"
    link: Connection


class RankTeam:
    """Their processes, from the start to their certain end.

    A rank has nothing of its own to save, so it is killed. ``lost`` may be asked on the event
    loop; the rest is for the model thread, and after its last step for whoever ends the worker.
    """

    def __init__(self, setup: RankSetup) -> None:
        """Start all but rank 0, whose setup it is.

        Raises ConfigurationError: there are no processes to be had, or no folder where they meet.
        """
        self._ranks: list[RankProcess] = []
        self._folder = _folder()
        self._setup = setup._replace(meeting_file=self._folder.path / "meeting")
        try:
            for rank in range(1, setup.share.size):
                self._ranks.append(_start(rank))
                send(self._ranks[-1].link, self._setup.of_rank(rank))
        except OSError as error:
            self.close()
            raise ConfigurationError(
                f"tensor_parallel: a rank cannot be started: {error}"
            ) from None

    def join(
        self,
        still_wanted: Callable[[], None],
        pool_bytes: int | None,
        device: torch.device = _HOST,
    ) -> None:
        """Until all are there, with their ``pools``, and ``ranks`` can be used.

        pool_bytes: of each pool; None: they take none. device: rank 0's. Arguments and errors
        else as of ``wait``.
        """
        self.wait(still_wanted)
        self.pools: list[MappedKVMemory] = []
        if pool_bytes is not None:
            for each in self._ranks:
                _until_heard(each, still_wanted)
                self.pools.append(_pool_of(each, pool_bytes))
        self.ranks = ProcessRanks(self._setup.share, self._setup.meeting_file, device)
        if device.type == "cpu":  # nccl goes on looking there
            self._folder.close()

    @property
    def links(self) -> list[Connection]:
        """To the others, in the order of their ranks."""
        return [each.link for each in self._ranks]

    def wait(self, still_wanted: Callable[[], None]) -> list[RankWord]:
        """Until each has said its next word; ``still_wanted()`` is called meanwhile, and may raise.

        Raises:
            ConfigurationError: a setting or file is wrong for one.
            DeviceLostError: one has ended.
        """
        words: list[RankWord] = []
        for each in self._ranks:
            _until_heard(each, still_wanted)
            try:
                word = hear_word(each.link)
            except (EOFError, OSError):
                raise DeviceLostError(f"rank {each.rank} has ended") from None
            if word.wrong:
                raise ConfigurationError(word.wrong)
            words.append(word)
        return words

    def lost(self) -> str | None:
        """Which one has ended, and how; None: all are there."""
        for each in self._ranks:
            code = each.process.poll()
            if code is not None:
                how = f"signal {-code}" if code < 0 else f"code {code}"
                return f"rank {each.rank} has ended: {how}"
        return None

    def close(self) -> None:
        """End them and wait until they are gone. Idempotent."""
        for each in self._ranks:
            each.process.kill()
        for each in self._ranks:
            each.process.wait()
            each.link.close()
        self._folder.close()


def _until_heard(rank: RankProcess, still_wanted: Callable[[], None]) -> None:
    """It has said something, or is gone."""
    while not rank.link.poll(_TURN_S):
        still_wanted()


def _pool_of(rank: RankProcess, num_bytes: int) -> MappedKVMemory:
    """Raises DeviceLostError: it has ended; ConfigurationError: there is no room for it here."""
    try:
        fd = recv_handle(rank.link)
    except (EOFError, OSError, RuntimeError):  # the last: something else came
        raise DeviceLostError(f"rank {rank.rank} has ended") from None
    try:
        return MappedKVMemory(fd, num_bytes)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"num_blocks or kv_cache_memory: the pool of rank {rank.rank} cannot be mapped: {error}"
        ) from None


def _folder() -> OwnFolder:
    """Where the ranks meet. Raises ConfigurationError."""
    try:
        return OwnFolder("ranks")
    except OSError as error:
        raise ConfigurationError(
            f"tensor_parallel: no folder for temporary files: {error}"
        ) from None


def _start(rank: int) -> RankProcess:
    ours, theirs = socket.socketpair()
    with theirs:
        arguments = {
            "parent-pid": os.getpid(),
            "socket-fd": theirs.fileno(),
        }
        command = module_command("diptych.worker.rank_main")
        try:
            process = subprocess.Popen(
                [*command, *(f"--{name}={value}" for name, value in arguments.items())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=2,  # nobody parses that
                process_group=0,  # a terminal's Ctrl-C is the first rank's matter
            )
        except BaseException:
            ours.close()
            raise
    logger.info("a rank starts", extra={"rank": rank, "pid": process.pid})
    return RankProcess(rank, process, Connection(ours.detach()))

"""A worker gets the pools of its ranks, or hears why not; it can be given up meanwhile."""

import os
import socket
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from diptych.engine.kv.memory import HostKVMemory
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.rank_share import RankShare
from diptych.errors import ConfigurationError, DeviceLostError
from diptych.worker import rank_team
from diptych.worker.rank_setup import RankSetup, RankWord, hear_setup, send
from diptych.worker.rank_team import RankProcess, RankTeam

POOL_BYTES = 4096
SETUP = RankSetup(
    share=RankShare(0, 3),
    folder=Path(),
    model_config=cast(ModelConfig, None),  # nobody loads it
    dtype=torch.float32,
    kv_dtype=torch.float32,
    block_size=16,
    device="cpu",
    prefill_attention="own",
    num_blocks=4,
    num_threads=1,
    service="test",
    log_level="INFO",
)


class Process:
    """Of a rank; whoever tests speaks for it over ``link``."""

    def __init__(self, link: Connection) -> None:
        self.link = link

    def kill(self) -> None:
        self.link.close()

    def wait(self) -> None: ...
    def poll(self) -> None: ...


class GivenUpError(Exception):
    """Loading was given up."""


def given_up() -> None:
    raise GivenUpError


def unasked() -> None:
    raise AssertionError("all had been said")


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    started: list[Process] = []

    def start(rank: int) -> RankProcess:
        ours, theirs = socket.socketpair()
        started.append(Process(Connection(theirs.detach())))
        return RankProcess(rank, cast(Any, started[-1]), Connection(ours.detach()))

    monkeypatch.setattr(rank_team, "_start", start)
    monkeypatch.setattr(rank_team, "_TURN_S", 0.0)
    monkeypatch.setattr(rank_team, "ProcessRanks", lambda share, file, device: share)
    return started


@pytest.fixture
def team(processes: list[Process]) -> Iterator[RankTeam]:
    team = RankTeam(SETUP)
    yield team
    team.close()


def test_without_a_folder_for_temporary_files_it_is_a_wrong_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(ConfigurationError, match=f"^tensor_parallel: .*{tmp_path}/gone"):
        RankTeam(SETUP)


def give_pool(process: Process) -> HostKVMemory:
    """What a rank does first, whose memory it is."""
    pool = HostKVMemory(POOL_BYTES)
    assert pool.shared_fd is not None
    send(process.link, RankWord())
    send_handle(process.link, pool.shared_fd, os.getpid())
    return pool


def test_the_pools_are_the_ranks_own_in_their_order(
    team: RankTeam, processes: list[Process]
) -> None:
    assert [hear_setup(process.link).share.rank for process in processes] == [1, 2]
    own = [give_pool(process) for process in reversed(processes)][::-1]
    team.join(unasked, POOL_BYTES)
    for rank, (pool, memory) in enumerate(zip(team.pools, own, strict=True), 1):
        memory.bytes[7] = rank
        assert pool.bytes[7] == rank
        assert pool.bytes.shape == memory.bytes.shape


def test_a_rank_without_room_says_so(team: RankTeam, processes: list[Process]) -> None:
    give_pool(processes[0])
    send(processes[1].link, RankWord("num_blocks: no memory"))
    with pytest.raises(ConfigurationError, match=r"^num_blocks: no memory$"):
        team.join(unasked, POOL_BYTES)


def test_a_rank_that_ends_before_it_gives_its_pool_is_lost(
    team: RankTeam, processes: list[Process]
) -> None:
    give_pool(processes[0])
    send(processes[1].link, RankWord())
    processes[1].link.close()
    with pytest.raises(DeviceLostError, match="rank 2 has ended"):
        team.join(unasked, POOL_BYTES)


def test_a_rank_that_gives_something_else_is_lost(team: RankTeam, processes: list[Process]) -> None:
    give_pool(processes[0])
    for _ in range(2):
        send(processes[1].link, RankWord())
    with pytest.raises(DeviceLostError, match="rank 2 has ended"):
        team.join(unasked, POOL_BYTES)


def test_a_rank_that_hangs_before_it_gives_its_pool_is_not_waited_for(
    team: RankTeam, processes: list[Process]
) -> None:
    give_pool(processes[0])
    send(processes[1].link, RankWord())
    with pytest.raises(GivenUpError):
        team.join(given_up, POOL_BYTES)

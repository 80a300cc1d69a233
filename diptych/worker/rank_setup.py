"""What the process of a rank is told at its start, by the worker that starts it."""

import pickle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, Self

import torch

from diptych.engine.model.config import ModelConfig
from diptych.engine.model.rank_share import RankShare
from diptych.engine.model.shard import FileStamp
from diptych.formats import DeviceName, PrefillAttentionName
from diptych.worker.config import WorkerConfig


class RankSetup(NamedTuple):
    """One rank: which part of which model, and how large its pool is."""

    share: RankShare
    folder: Path  # of the model
    model_config: ModelConfig  # of the whole model; rank 0 has read it
    dtype: torch.dtype  # of weights and arithmetic
    kv_dtype: torch.dtype
    block_size: int
    device: DeviceName
    prefill_attention: PrefillAttentionName
    num_blocks: int | None  # of the pool with its scratch blocks; None: rank 0 takes and gives it
    num_threads: int
    service: str  # in its log lines
    log_level: str
    meeting_file: Path = Path()  # where the ranks find each other; who starts them says

    @classmethod
    def of(
        cls,
        config: WorkerConfig,
        *,
        folder: Path,
        model_config: ModelConfig,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: DeviceName,
        num_blocks: int | None,
        num_threads: int,
    ) -> Self:
        """Rank 0's. num_threads: of each rank."""
        return cls(
            share=RankShare(0, config.tensor_parallel),
            folder=folder,
            model_config=model_config,
            dtype=dtype,
            kv_dtype=kv_dtype,
            block_size=config.block_size,
            device=device,
            prefill_attention=config.prefill_attention,
            num_blocks=num_blocks,
            num_threads=num_threads,
            service=f"diptych-{config.role}",
            log_level=config.log_level,
        )

    def of_rank(self, rank: int) -> Self:
        """Another rank's."""
        share = self.share._replace(rank=rank)
        return self._replace(share=share, service=f"{self.service}-rank-{rank}")


class RankWord(NamedTuple):
    """What a rank says, twice: that it has its pool, if that is its own, whose file follows; and
    its weights."""

    wrong: str = ""  # the one line of a wrong setting or file; then it ends
    files: tuple[FileStamp, ...] = ()  # that its weights were read from


def send(link: Connection, word: RankSetup | RankWord) -> None:
    """Raises OSError: the other side is gone."""
    link.send_bytes(pickle.dumps(word))


def hear_setup(link: Connection) -> RankSetup:
    """Raises EOFError, OSError."""
    setup: RankSetup = pickle.loads(link.recv_bytes())
    return setup


def hear_word(link: Connection) -> RankWord:
    """Raises EOFError, OSError."""
    word: RankWord = pickle.loads(link.recv_bytes())
    return word

"""What the leader tells its followers: messages over a socket pair for each of them."""

import pickle
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple, TypeAlias

import torch

from diptych.engine.inputs import StepInputs
from diptych.engine.model.parts import Rows


class RankStep(NamedTuple):
    """All layers follow: the same as the leader's, with a follower's own part of the weights."""

    inputs: StepInputs  # on the host
    rows: Rows  # whose hidden states the leader wants
    drawn: Rows | None  # whose tokens the host does not know: rank 0 shares them first


class RankMark(NamedTuple):
    """That was all that the step's device is asked for at once; another step may come."""


class RankHead(NamedTuple):
    """A product with the head follows; any number of them after a step's layers, or none.

    What is multiplied is rank 0's, of all ranks the next thing that they tell each other.
    """

    num_rows: int


class RankPoolGiven(NamedTuple):
    """A rank's pool from now on, in memory of its device that the leader has taken."""

    handle: bytes  # see :mod:`diptych.engine.kv.device_handle`
    num_blocks: int
    block_size: int
    dtype: torch.dtype


class RankClear(NamedTuple):
    """The first blocks of the pool become zero."""

    num_blocks: int


class RankEnd(NamedTuple):
    """That was all of the oldest step: all ranks meet when they have done it."""


RankMessage: TypeAlias = RankStep | RankMark | RankHead | RankPoolGiven | RankClear | RankEnd


def tell(links: Sequence[Connection], message: RankMessage) -> None:
    """Tell all followers. Raises OSError: one of them is gone."""
    told = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    for link in links:
        link.send_bytes(told)


def hear(link: Connection) -> RankMessage:
    """Wait for the next message. Raises EOFError: the leader is gone."""
    message: RankMessage = pickle.loads(link.recv_bytes())
    return message

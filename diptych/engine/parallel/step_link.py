"""What the leader tells its followers of a step: messages over a socket pair for each of them."""

import pickle
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple

from torch import Tensor

from diptych.engine.inputs import StepInputs
from diptych.engine.model.parts import Rows


class RankStep(NamedTuple):
    """All layers follow: the same as the leader's, with a follower's own part of the weights."""

    inputs: StepInputs
    rows: Rows  # whose hidden states the leader wants


class RankHead(NamedTuple):
    """A product with the head follows; any number of them after a step's layers, or none."""

    x: Tensor  # [num_rows, hidden_size]


class RankEnd(NamedTuple):
    """That was all of the step: all ranks meet."""


def tell(links: Sequence[Connection], message: RankStep | RankHead | RankEnd) -> None:
    """Tell all followers. Raises OSError: one of them is gone."""
    told = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    for link in links:
        link.send_bytes(told)


def hear(link: Connection) -> RankStep | RankHead | RankEnd:
    """Wait for the next message. Raises EOFError: the leader is gone."""
    message: RankStep | RankHead | RankEnd = pickle.loads(link.recv_bytes())
    return message

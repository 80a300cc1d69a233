"""How the leader tells one follower of a step: bytes over a socket pair, one message a step."""

import pickle
from multiprocessing.connection import Connection
from typing import NamedTuple

from diptych.engine.inputs import StepInputs
from diptych.engine.model.parts import Rows


class RankStep(NamedTuple):
    """What a follower computes: the same as the leader, with its own part of the weights."""

    inputs: StepInputs
    rows: Rows  # whose logits the leader wants


def tell(links: list[Connection], step: RankStep) -> None:
    """Send a step to all followers. Raises OSError: one of them is gone."""
    message = pickle.dumps(step, pickle.HIGHEST_PROTOCOL)
    for link in links:
        link.send_bytes(message)


def hear(link: Connection) -> RankStep:
    """Wait for the next step. Raises EOFError: the leader is gone."""
    step: RankStep = pickle.loads(link.recv_bytes())
    return step

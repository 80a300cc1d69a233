"""What a session remembers of one sequence, and the phases it goes through. Pure."""

import enum
from dataclasses import dataclass

from decode_worker.actions import RunPull
from diptych.engine.sequence import Sequence
from diptych.engine.step import SequenceUpdate
from diptych.v1 import common_pb2


class Phase(enum.Enum):
    """Where a sequence stands between its Reserve and its Ended."""

    RESERVED = enum.auto()  # blocks held, KV missing, nothing under way
    PULLING = enum.auto()  # a pull is under way
    PROVEN = enum.auto()  # KV whole, Start to come
    RUNNING = enum.auto()  # in the engine's hands


NEXT_PHASES: dict[Phase, frozenset[Phase]] = {
    Phase.RESERVED: frozenset({Phase.PULLING, Phase.PROVEN, Phase.RUNNING}),
    Phase.PULLING: frozenset({Phase.RESERVED, Phase.PROVEN}),
    Phase.PROVEN: frozenset({Phase.RUNNING}),
    Phase.RUNNING: frozenset(),
}


@dataclass(slots=True, eq=False)
class Entry:
    """One sequence between Reserve and Ended."""

    spec: common_pb2.SequenceSpec
    sequence: Sequence
    phase: Phase = Phase.RESERVED
    bind_id: int | None = None  # of the newest Bind
    pull: RunPull | None = None  # set in PULLING
    num_computed_tokens: int = 0  # by this worker; computed again, counted again

    def move(self, phase: Phase) -> None:
        assert phase in NEXT_PHASES[self.phase], f"{self.phase} -> {phase}"
        self.phase = phase

    def book(self, update: SequenceUpdate) -> None:
        """Count what a step computed."""
        self.num_computed_tokens += update.num_step_tokens

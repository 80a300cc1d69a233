"""One sequence as a decode worker holds it, and the phases it goes through. Pure."""

import enum
from dataclasses import dataclass

from decode_worker.actions import RunPull
from diptych.engine.scheduling.sequence import Sequence
from diptych.engine.scheduling.step import SequenceUpdate
from diptych.transitions import Transitions
from diptych.v1 import common_pb2


class Phase(enum.Enum):
    """Where a sequence stands between its Reserve and its Ended."""

    RESERVED = enum.auto()  # blocks held, KV missing, nothing under way
    PULLING = enum.auto()  # a pull is under way
    PROVEN = enum.auto()  # KV whole, Start to come
    RUNNING = enum.auto()  # in the engine's hands


class HeldEvent(enum.Enum):
    """What moves it. Its end, from any phase, is that it is forgotten."""

    BIND = enum.auto()
    STOP_PULL = enum.auto()  # by a newer Bind, a Start that does not wait, the end
    PULL_FAILED = enum.auto()
    PROVE = enum.auto()
    START = enum.auto()


HELD_TRANSITIONS = Transitions(
    {
        Phase.RESERVED: {
            HeldEvent.BIND: Phase.PULLING,
            HeldEvent.PROVE: Phase.PROVEN,  # nothing was missing
            HeldEvent.START: Phase.RUNNING,  # it computes what is missing
        },
        Phase.PULLING: {
            HeldEvent.STOP_PULL: Phase.RESERVED,
            HeldEvent.PULL_FAILED: Phase.RESERVED,
            HeldEvent.PROVE: Phase.PROVEN,
        },
        Phase.PROVEN: {HeldEvent.START: Phase.RUNNING},
    },
    ignored={
        Phase.RESERVED: {HeldEvent.STOP_PULL},
        Phase.PROVEN: {HeldEvent.BIND, HeldEvent.STOP_PULL},
        Phase.RUNNING: {HeldEvent.BIND, HeldEvent.STOP_PULL, HeldEvent.START},
    },
)


@dataclass(slots=True, eq=False)
class HeldSequence:
    """One sequence between Reserve and Ended."""

    spec: common_pb2.SequenceSpec
    sequence: Sequence
    phase: Phase = Phase.RESERVED
    bind_id: int | None = None  # of the newest Bind
    pull: RunPull | None = None  # set in PULLING
    num_computed_tokens: int = 0  # by this worker; computed again, counted again
    num_computed_prompt_tokens: int = 0  # of these

    def move(self, event: HeldEvent) -> None:
        self.phase = HELD_TRANSITIONS.after(self.phase, event) or self.phase

    def book(self, update: SequenceUpdate) -> None:
        """Count what a step computed."""
        self.num_computed_tokens += update.num_step_tokens
        end = min(update.num_computed_tokens, self.sequence.num_prompt_tokens)
        start = update.num_computed_tokens - update.num_step_tokens
        self.num_computed_prompt_tokens += max(0, end - start)

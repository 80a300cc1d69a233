"""Who asked for a sequence of the scheduler's machine."""

from dataclasses import dataclass, field

from diptych.engine.scheduling.sequence import Sequence
from diptych.finish_reason import FinishReason


@dataclass(eq=False)
class Client:
    """What the other side knows of a sequence."""

    seq: Sequence
    received: list[int]  # prompt and output, as sent to it
    finish_reason: FinishReason | None = None
    # Of a lease: blocks, with their generations, that readers may know of or steps write.
    fixed: list[tuple[int, int]] = field(default_factory=list)

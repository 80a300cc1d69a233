"""Whose next step may be planned before the token is known that this one draws. Pure.

A device draws the tokens of most sequences and goes on from them by itself, counting the one that
it alone has where penalties and words depend on it. Of the others the host has to see each token
before it can say how the next one is drawn, or draws it itself: each reason has its name here, and
the scheduler and the runner go by this alone. Strings that end an answer are no reason: they are
looked for in the text, elsewhere, and whoever has met one is released.
"""

import enum

from diptych.engine.scheduling.sequence import Sequence
from diptych.sampling_params import SamplingParams

GREEDY_BELOW = 1e-5  # smaller temperatures overflow float32 and mean greedy anyway


class Awaited(enum.Enum):
    """Why the host has to see a token before the sequence's next step can be planned."""

    CONSTRAINT = "the grammar is the host's, and goes on token by token"
    MARGINS = "margins are taken on the host"


def awaited(params: SamplingParams) -> Awaited | None:
    """Why a token so drawn is drawn on the host; None: the device draws it."""
    if params.constraint is not None:
        return Awaited.CONSTRAINT
    if params.return_margins:
        return Awaited.MARGINS
    return None


def ends_with_next(seq: Sequence, max_model_len: int) -> bool:
    """Whether a token is being drawn that is its last one, whichever it is."""
    return seq.num_unknown_tokens > 0 and (
        seq.prefill_only
        or seq.num_output_tokens + 1 >= seq.sampling.max_tokens
        or seq.num_tokens + 1 >= max_model_len
    )


def waits_for_token(seq: Sequence) -> bool:
    """Whether a token is being drawn that has to be known before another is planned."""
    return seq.num_unknown_tokens > 0 and awaited(seq.sampling) is not None

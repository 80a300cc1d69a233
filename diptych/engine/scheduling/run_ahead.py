"""Whose next step may be planned before the token is known that this one draws. Pure.

A device draws the tokens of most sequences and goes on from them by itself. Of the others the host
has to see each token before it can say how the next one is drawn, or draws it itself: each reason
has its name here, and the scheduler and the runner go by this alone.
"""

import enum

from diptych.engine.scheduling.sequence import Sequence
from diptych.sampling_params import SamplingParams

GREEDY_BELOW = 1e-5  # smaller temperatures overflow float32 and mean greedy anyway


class Awaited(enum.Enum):
    """Why the host has to see a token before the sequence's next step can be planned."""

    HISTORY = "penalties, words or a constraint: what comes next depends on the tokens so far"
    EDITS = "changes of single logits are made on the host"
    TOLD = "log probabilities and margins are taken on the host"


def awaited(params: SamplingParams, *, allow_stop: bool) -> Awaited | None:
    """Why a token so drawn is drawn on the host; None: the device draws it."""
    if params.needs_history:
        return Awaited.HISTORY
    if params.logprobs is not None or params.return_margins:
        return Awaited.TOLD
    if params.logit_bias or params.bad_words or not (allow_stop or not params.stop_token_ids):
        return Awaited.EDITS
    return None


def ends_with_next(seq: Sequence, max_model_len: int) -> bool:
    """Whether the token that is being drawn is its last one, whichever it is."""
    return (
        seq.prefill_only
        or seq.num_output_tokens + 1 >= seq.sampling.max_tokens
        or seq.num_tokens + 1 >= max_model_len
    )


def waits_for_token(seq: Sequence) -> bool:
    """Whether the token that is being drawn has to be known before another is planned."""
    allow_stop = seq.num_output_tokens >= seq.sampling.min_tokens
    return awaited(seq.sampling, allow_stop=allow_stop) is not None

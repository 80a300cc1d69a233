"""What no worker may say of a sequence, as nobody could tell it on. Pure.

Read by the links, for which whoever says such a thing does not hold the sequence any more.
"""

import math
from typing import Final

from diptych.token_logprobs import is_whole
from diptych.v1 import common_pb2, decode_pb2, prefill_pb2

_LOGPROBS: Final = "it told log probabilities that are none"
_MARGINS: Final = "it told margins that are none"
_STATS: Final = "it told times of a pull that are none"


def of_first_token(first: prefill_pb2.FirstToken) -> str | None:
    """What is wrong with it; None: nothing."""
    if first.HasField("logprobs") and not is_whole((first.logprobs,)):
        return _LOGPROBS
    return _MARGINS if first.HasField("margin") and math.isnan(first.margin) else None


def of_tokens(tokens: decode_pb2.SequenceTokens) -> str | None:
    """What is wrong with them; None: nothing."""
    num_tokens, logprobs, margins = len(tokens.token_ids), tokens.logprobs, tokens.margins
    if logprobs and not (len(logprobs) == num_tokens and is_whole(logprobs)):
        return _LOGPROBS
    if margins and not (len(margins) == num_tokens and not any(map(math.isnan, margins))):
        return _MARGINS
    return None


def of_stats(stats: common_pb2.TransferStats) -> str | None:
    """What is wrong with them; None: nothing."""
    times_s = (stats.read_s, stats.exposed_s, stats.total_s, stats.digest_s)
    return None if all(map(math.isfinite, times_s)) else _STATS

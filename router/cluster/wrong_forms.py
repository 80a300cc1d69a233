"""What no worker may say of a sequence, as nobody could tell it on. Pure.

Read by the links, for which whoever says such a thing does not hold the sequence any more.
"""

import math
from typing import Final

from diptych.token_logprobs import is_whole
from diptych.v1 import common_pb2, decode_pb2, prefill_pb2

_LOGPROBS: Final = "it told log probabilities that are none"
_STATS: Final = "it told times of a pull that are none"


def of_first_token(first: prefill_pb2.FirstToken) -> str | None:
    """What is wrong with it; None: nothing."""
    if first.HasField("logprobs") and not is_whole((first.logprobs,)):
        return _LOGPROBS
    return None


def of_tokens(tokens: decode_pb2.SequenceTokens) -> str | None:
    """What is wrong with them; None: nothing."""
    logprobs = tokens.logprobs
    if not logprobs or (len(logprobs) == len(tokens.token_ids) and is_whole(logprobs)):
        return None
    return _LOGPROBS


def of_stats(stats: common_pb2.TransferStats) -> str | None:
    """What is wrong with them; None: nothing."""
    times_s = (stats.read_s, stats.exposed_s, stats.total_s, stats.digest_s)
    return None if all(map(math.isfinite, times_s)) else _STATS

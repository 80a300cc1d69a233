"""What workers told of the prompt's own tokens: which came, and which are missing. Pure."""

import math
from collections.abc import Callable
from typing import NamedTuple

from diptych.token_logprobs import is_whole
from diptych.v1 import common_pb2, prefill_pb2


class WantedLogprobs(NamedTuple):
    """Log probabilities of the prompt's tokens at ``first_position`` up to ``end_position``."""

    first_position: int  # at least 1: nothing comes before the first token
    end_position: int
    num_top: int  # likeliest tokens in each one's place


class WantedStates(NamedTuple):
    """One vector of the prompt's hidden states."""

    pooling: int  # common_pb2.Pooling
    num_values: int | None = None  # of the vector; None: it is not known


Wanted = WantedLogprobs | WantedStates
ToldPart = common_pb2.PromptLogprobs | prefill_pb2.PooledStates
ToldSink = Callable[[ToldPart], None]


class PromptTold:
    """Accepts parts only at the position that is next. Owned by the request's machine.

    Invariant: ``sink`` saw what is wanted in order, each token once.
    """

    def __init__(self, wanted: Wanted | None, sink: ToldSink) -> None:
        self.has_begun = False
        """Whether ``sink`` saw something, so that the rest has to be of the same weights."""
        self._wanted = wanted
        self._sink = sink

    @property
    def missing(self) -> Wanted | None:
        """What is still to be told; None: nothing."""
        wanted = self._wanted
        if isinstance(wanted, WantedLogprobs) and wanted.first_position >= wanted.end_position:
            return None
        return wanted

    def accept(self, part: ToldPart) -> bool:
        """Take what is next of a part, and nothing twice.

        False: tokens before it are missing, or it cannot be told.
        """
        wanted = self.missing
        if isinstance(part, prefill_pb2.PooledStates):
            if isinstance(wanted, WantedStates):
                is_long = wanted.num_values in (None, len(part.values))
                if not is_long or not all(map(math.isfinite, part.values)):
                    return False
                self._wanted = None
                self._tell(part)
            return True
        return not isinstance(wanted, WantedLogprobs) or self._accept_next(wanted, part)

    def _accept_next(self, wanted: WantedLogprobs, part: common_pb2.PromptLogprobs) -> bool:
        known = wanted.first_position - part.position
        if known < 0 or not is_whole(part.logprobs):
            return False
        if known >= len(part.logprobs):
            return True
        if known or part.position + len(part.logprobs) > wanted.end_position:
            fresh = part.logprobs[known : wanted.end_position - part.position]
            part = common_pb2.PromptLogprobs(position=wanted.first_position, logprobs=fresh)
        self._wanted = wanted._replace(first_position=part.position + len(part.logprobs))
        self._tell(part)
        return True

    def _tell(self, part: ToldPart) -> None:
        self.has_begun = True
        self._sink(part)

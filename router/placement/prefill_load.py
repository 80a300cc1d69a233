"""How much waits to be computed on one prefill worker, and whether it may take more. Pure."""

import math
from typing import Final, NamedTuple

from router.placement.runway import Runway
from router.placement.spare import is_idle
from router.placement.takes import PrefillTakes


class OwnPrompts(NamedTuple):
    """A router's own that it sent to one worker, and that are not computed."""

    num_tokens: int = 0
    num_sent_tokens: int = 0  # of these, such as were not there when it told how it is
    payers: frozenset[bytes] = frozenset()


NO_PROMPTS: Final = OwnPrompts()


class PrefillLoad:
    """Of one worker, as one router knows it: what it told less our own then, plus our own now.

    Who hears from the worker calls ``told``; who sends to it, or hears of that, ``loaded``.

    What it told may be heard before prompts that were computed by then are heard of. Those are the
    prompts that are gone sooner than the step could end that it told of: they were not in it.
    """

    def __init__(self, runway: Runway) -> None:
        self.own = NO_PROMPTS
        self.tokens_per_s = 0.0  # that it computes; 0 until it has measured that
        self._runway = runway
        self._num_others_tokens = 0
        self._num_told_tokens = 0  # of all, when it told: begun prompts count less
        self._num_own_told_tokens = 0  # of ours, when it told
        self._computes_none_s = 0.0

    def told(
        self,
        num_pending_tokens: int,
        tokens_per_s: float,
        own: OwnPrompts,
        computes_none_s: float = 0.0,
    ) -> None:
        """It said how it is: what is not ours of its load is others'.

        ``computes_none_s``: from then on, in which none of what it told of can be computed.
        """
        self.own, self.tokens_per_s = own, tokens_per_s
        self._computes_none_s = computes_none_s
        self._num_told_tokens = num_pending_tokens
        self._num_own_told_tokens = self._num_there_tokens
        self._num_others_tokens = max(0, num_pending_tokens - self._num_there_tokens)

    def loaded(self, own: OwnPrompts, since_s: float = math.inf) -> None:
        """So much of ours waits there now, ``since_s`` after it told."""
        before = self._num_there_tokens
        self.own = own
        if since_s < self._computes_none_s:
            self._num_own_told_tokens -= max(0, before - self._num_there_tokens)

    @property
    def num_pending_tokens(self) -> int:
        """All routers' together."""
        return self.own.num_tokens + self._num_others_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Of ours that it had when it told, those that it has no more."""
        return max(0, self._num_own_told_tokens - self._num_there_tokens)

    def takes(self, num_beside_tokens: int = 0) -> PrefillTakes:
        """``num_beside_tokens``: of prompts that it computes for sequences of its own, besides."""
        return PrefillTakes(
            self._runway.is_open(self._num_own_left_tokens, self.tokens_per_s),
            self._runway.is_open_beyond(self._num_own_left_tokens, self.tokens_per_s),
            is_idle(self.num_pending_tokens + num_beside_tokens, self.tokens_per_s),
        )

    @property
    def _num_there_tokens(self) -> int:
        """Of ours, those that it had when it told, and has."""
        return self.own.num_tokens - self.own.num_sent_tokens

    @property
    def _num_own_left_tokens(self) -> int:
        """Less what was computed of prompts that had begun when it told."""
        return min(self.own.num_tokens, self._num_told_tokens + self.own.num_sent_tokens)

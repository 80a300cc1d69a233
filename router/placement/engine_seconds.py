"""What a request takes of the engines, s: its prompt, and its part of each of its steps. Pure.

What requests are charged by where many wait. As workers say of their own steps; until they do,
by a guess that weighs a token of the answer as ten of the prompt.
"""

import math
import statistics
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from diptych.step_model import StepWork
from router.placement.views import DecodeView, EngineView, PrefillView, Snapshot

_CHUNK_TOKENS: Final = 512  # of a prompt, by which its tokens' cost is told
_FRESH_S: Final = 0.25
# At a time: a tenant that is charged far too much in one moment waits for all others for hours.
_MOST_RISE: Final = 2.0
_LEAST_S: Final = 1e-9  # from which they rise, however little one said a token takes
_CONTEXT_TOKENS: Final = 512  # of a sequence, where a worker has none to tell by


class EngineRates(NamedTuple):
    """Seconds of an engine for each token."""

    prompt_token_s: float = 0.001  # that no cache has
    output_token_s: float = 0.01

    def cost_s(self, num_prompt_tokens: int, num_output_tokens: int) -> float:
        """Of both phases together."""
        return num_prompt_tokens * self.prompt_token_s + num_output_tokens * self.output_token_s


_GUESS: Final = EngineRates()


def rates_of(snapshot: Snapshot, otherwise: EngineRates = _GUESS) -> EngineRates:
    """The median of what workers say now; ``otherwise`` where none of a pool knows its steps.

    What one says that is astray does not count so. Where there is no prefill worker, those that
    decode compute the prompts.
    """
    local = [view for view in snapshot.decode if view.local_prefill]
    return EngineRates(
        _median(map(_prompt_token_s, _engines(snapshot.prefill or local)), otherwise[0]),
        _median(map(_output_token_s, _engines(snapshot.decode)), otherwise[1]),
    )


class RecentRates:
    """The rates of one router's workers, not older than ``_FRESH_S``: few look at all workers.

    They rise by steps. Where nobody is there to tell of a pool they are what they were: workers
    that are away, or have another role for a while, make no token dearer or cheaper.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock`` in s."""
        self._clock = clock
        self._until_s = -math.inf
        self._rates = _GUESS

    def of(self, snapshot: Snapshot) -> EngineRates:
        """As of now, or of little before."""
        now_s = self._clock()
        if now_s >= self._until_s:
            before, now = self._rates, rates_of(snapshot, self._rates)
            self._rates = EngineRates(
                _risen(now.prompt_token_s, before.prompt_token_s),
                _risen(now.output_token_s, before.output_token_s),
            )
            self._until_s = now_s + _FRESH_S
        return self._rates


def _risen(now_s: float, before_s: float) -> float:
    return min(now_s, _MOST_RISE * max(before_s, _LEAST_S))


def _engines(views: Iterable[PrefillView | DecodeView]) -> list[EngineView]:
    return [view.engine for view in views if view.engine is not None]


def _prompt_token_s(engine: EngineView) -> float | None:
    cost = engine.model.prefill
    if not cost.is_known:
        return None
    return cost.expected_s(StepWork.of_prompt(_CHUNK_TOKENS, 0)) / _CHUNK_TOKENS


def _output_token_s(engine: EngineView) -> float | None:
    """A sequence's part of a step: the more run beside it, the less."""
    cost, work = engine.model.decode, engine.work
    if not cost.is_known:
        return None
    if not work.num_decode_rows:
        return cost.expected_s(StepWork(1, _CONTEXT_TOKENS))
    step = StepWork(work.num_decode_rows, work.num_context_tokens)
    return cost.expected_s(step) / work.num_decode_rows


def _median(values: Iterable[float | None], otherwise: float) -> float:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else otherwise

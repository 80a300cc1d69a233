"""When a request's first token would come from a worker, and how far apart the next. Pure.

A forecast is a function of what workers said on Watch and of what this router has sent them
since: the queue there is worked off in steps as long as the worker's own model of them says.
A payer's prompts are computed in the order in which they came, and payers take turns; what a step
has of one is bounded by the worker's budget.
"""

import math
from typing import NamedTuple

from diptych.step_model import StepWork
from router.placement.place import distance_ratio
from router.placement.types import DecodeView, EngineView, PrefillView

_NINE_OF_TEN = 1.2816  # standard deviations
_MOST_PREFILL_TIME = 0.9  # of its time, that a worker is taken to spend on prompts


class Span(NamedTuple):
    """How long something takes: as expected, and what nine of ten do not exceed."""

    expected_s: float
    upper_s: float

    def later(self, more_s: float) -> "Span":
        """The same with so much more in any case."""
        return Span(self.expected_s + more_s, self.upper_s + more_s)

    def miss_ratio(self, within_s: float) -> float:
        """How likely it takes longer, if its logarithm is spread evenly around what is expected."""
        if within_s <= 0.0:
            return 1.0
        if self.expected_s <= 0.0:
            return 0.0
        if self.upper_s <= self.expected_s:
            return float(self.expected_s > within_s)
        spread = math.log(self.upper_s / self.expected_s) / _NINE_OF_TEN
        return 0.5 * math.erfc(math.log(within_s / self.expected_s) / (spread * math.sqrt(2.0)))


class PrefillForecast(NamedTuple):
    """A prompt on one worker, behind all that waits there."""

    first_token: Span
    own_s: float  # of that, the prompt's own steps
    num_own_steps: int


def of_prefill(
    view: PrefillView | DecodeView, prompt: StepWork, num_passed: int = 0
) -> PrefillForecast | None:
    """What computing ``prompt`` takes there; None: the worker's steps are not known yet.

    ``num_passed`` tokens of others' prompts come behind it, but for a step's that has begun.
    """
    engine = view.engine
    if engine is None or not engine.model.prefill.is_known or not engine.max_batched_tokens:
        return None
    queued = _queued(engine, prompt, max(0, num_passed - _budget(engine)))
    before_s, num_before = _steps_s(engine, queued)
    total_s, num_steps = _steps_s(engine, queued.plus(prompt))
    expected_s = max(total_s - _elapsed_s(engine, before_s, num_before), total_s - before_s)
    first = Span(expected_s, expected_s * engine.model.prefill.upper_ratio)
    return PrefillForecast(first, total_s - before_s, max(1, num_steps - num_before))


class Queue(NamedTuple):
    """Prompts that wait on a worker, and the step that computes some. Seconds."""

    step_s: float = 0.0  # that runs; as much of it may be over as not
    behind_s: float = 0.0  # what comes behind it


def of_prompts(view: DecodeView) -> Queue:
    """Those that it was given; none where that is not known."""
    engine = view.engine
    if engine is None or not engine.model.prefill.is_known or not engine.max_batched_tokens:
        return Queue()
    all_s, num_steps = _steps_s(engine, _queued(engine, StepWork(), 0))
    step_s = all_s / num_steps if num_steps and engine.work.num_prefill_tokens else 0.0
    return Queue(step_s, all_s - step_s)


class DecodeForecast(NamedTuple):
    """The time between two tokens on one worker, without and with one sequence more."""

    num_rows: int  # sequences that are there, or were sent there
    before: Span
    after: Span


def of_decode(view: DecodeView, num_tokens: int) -> DecodeForecast | None:
    """With one sequence of so many tokens more; None: the worker's steps are not known yet.

    Sequences that were sent there and do not run yet are taken to be as long. A worker of both
    roles that computed prompts is taken to go on so: each token waits for its part of them.
    """
    engine = view.engine
    if engine is None or not engine.model.decode.is_known:
        return None
    cost, said = engine.model.decode, engine.work
    num_rows = max(view.num_sequences, said.num_decode_rows)
    left_ratio = 1.0 - min(view.prefill_time_ratio, _MOST_PREFILL_TIME)

    def pace(num: int) -> Span:
        num_context = said.num_context_tokens + (num - said.num_decode_rows) * num_tokens
        token_s = cost.expected_s(StepWork(num, num_context)) / left_ratio
        return Span(token_s, token_s * cost.upper_ratio)

    return DecodeForecast(num_rows, pace(num_rows), pace(num_rows + 1))


def alone_s(view: DecodeView, num_tokens: int) -> float | None:
    """The time between tokens of one sequence of so many, alone there; None: it is not known."""
    engine = view.engine
    if engine is None or not engine.model.decode.is_known:
        return None
    return engine.model.decode.expected_s(StepWork(1, num_tokens))


def _budget(engine: EngineView) -> int:
    """Tokens of prompts in one step."""
    return max(1, engine.max_batched_tokens - engine.work.num_decode_rows)


def _steps_s(engine: EngineView, work: StepWork) -> tuple[float, int]:
    """What computing ``work`` takes beside what decodes there, and in how many steps."""
    cost, said = engine.model.prefill, engine.work
    num_steps = math.ceil(work.num_prefill_tokens / _budget(engine))
    each_s = cost.expected_s(StepWork(said.num_decode_rows, said.num_context_tokens), 0)
    return cost.expected_s(work, num_steps) + num_steps * each_s, num_steps


def transfer_s(source: PrefillView, view: DecodeView, num_tokens: int) -> float:
    """A pull of what is missing, if prefill hid nothing of it; a little less from nearby."""
    bytes_per_s = view.bytes_per_s.get(source.worker.incarnation, 0.0)
    if not bytes_per_s:
        return 0.0
    num_bytes = view.shipped.of(num_tokens)
    return distance_ratio(source.place, view.place) * num_bytes / bytes_per_s


def _queued(engine: EngineView, prompt: StepWork, num_passed: int) -> StepWork:
    """Prompts ahead of ours: what the worker said, and what changed since, less what ours passes.

    Of what was sent since, the lengths are taken to be ours.
    """
    said, since = engine.work, engine.num_departed_tokens
    # What it had may have been computed in part when it told: no more is gone than it told of.
    num_left = max(0, said.num_prefill_tokens - engine.num_computed_tokens)
    pairs = said.num_attention_pairs * num_left / (said.num_prefill_tokens or 1)
    pairs += since * prompt.num_attention_pairs / (prompt.num_prefill_tokens or 1)
    num_ahead = max(0, num_left + since - num_passed)
    pairs *= num_ahead / (num_left + since or 1)
    return StepWork(num_prefill_tokens=num_ahead, num_attention_pairs=round(pairs))


def _elapsed_s(engine: EngineView, queued_s: float, num_queued: int) -> float:
    """What is over, by expectation, of the step that runs; less than 0 if it is none of those.

    A step was half done when it was told of. One without prompts has its other half before it.
    """
    if engine.work.num_prefill_tokens and num_queued:
        return 0.5 * queued_s / num_queued
    if engine.work.num_decode_rows and engine.model.decode.is_known:
        return -0.5 * engine.model.decode.expected_s(engine.work)
    return 0.0

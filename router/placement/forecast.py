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
    view: PrefillView | DecodeView, prompt: StepWork, now_s: float, num_passed: int = 0
) -> PrefillForecast | None:
    """What computing ``prompt`` takes there; None: the worker's steps are not known yet.

    ``num_passed`` tokens of others' prompts come behind it, but for a step's that has begun.
    """
    engine = view.engine
    if engine is None or not engine.model.prefill.is_known or not engine.max_batched_tokens:
        return None
    num_told = _num_told(engine)
    running = _running(engine, num_told, now_s)
    queued = _queued(engine, num_told, prompt, max(0, num_passed - _budget(engine)))
    behind = _part(queued, max(0, queued.num_prefill_tokens - running.num_tokens))
    before_s, num_before = _steps_s(engine, behind)
    total_s, num_steps = _steps_s(engine, behind.plus(prompt))
    expected_s = running.left_s + total_s
    if running.left_s < 0.0:  # all that was ahead may be over
        expected_s = max(expected_s, _steps_s(engine, prompt)[0])
    first = Span(expected_s, expected_s * engine.model.prefill.upper_ratio)
    return PrefillForecast(first, total_s - before_s, max(1, num_steps - num_before))


class Queue(NamedTuple):
    """Prompts that wait on a worker, and the step that computes some. Seconds."""

    step_s: float = 0.0  # that runs; as much of it may be over as not
    behind_s: float = 0.0  # what comes behind it


def of_prompts(view: DecodeView, now_s: float) -> Queue:
    """Those that it was given; none where that is not known."""
    engine = view.engine
    if engine is None or not engine.model.prefill.is_known or not engine.max_batched_tokens:
        return Queue()
    num_told = _num_told(engine)
    running = _running(engine, num_told, now_s)
    queued = _queued(engine, num_told, StepWork(), 0)
    behind_s, _ = _steps_s(engine, _part(queued, queued.num_prefill_tokens - running.num_tokens))
    if engine.prefill_began_s is None:
        return Queue(running.step_s, behind_s)
    return Queue(0.0, max(0.0, running.left_s + behind_s) if queued.num_prefill_tokens else 0.0)


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
    beside_s = said.num_decode_rows * cost.row_s + said.num_context_tokens * cost.context_token_s
    return cost.expected_s(work, num_steps) + num_steps * beside_s, num_steps


def transfer_s(source: PrefillView, view: DecodeView, num_tokens: int) -> float:
    """A pull of what is missing, if prefill hid nothing of it; a little less from nearby."""
    bytes_per_s = view.bytes_per_s.get(source.worker.incarnation, 0.0)
    if not bytes_per_s:
        return 0.0
    num_bytes = view.shipped.of(num_tokens)
    return distance_ratio(source.place, view.place) * num_bytes / bytes_per_s


class _Running(NamedTuple):
    """The step that a worker is at."""

    num_tokens: int  # of prompts, that it computes
    step_s: float  # what it takes, if it computes any
    left_s: float  # of it, by expectation; below 0: steps behind it have been under way so long


def _running(engine: EngineView, num_told: int, now_s: float) -> _Running:
    """``num_told``: tokens of the prompts that it told of.

    Who does not say how long it has been at them was half done with a step when it told. One
    without prompts has its other half before it.
    """
    said, began_s = engine.work, engine.prefill_began_s
    if num_told:
        num_tokens = min(_budget(engine), num_told)
        step_s, _ = _steps_s(engine, _part(_prompts(said), num_tokens))
        age_s = 0.5 * step_s if began_s is None else now_s - began_s
        if age_s < 0.0:  # what comes until then is in it too
            return _Running(0, 0.0, -age_s)
        return _Running(num_tokens, step_s, step_s - age_s)
    if said.num_decode_rows and engine.model.decode.is_known:
        return _Running(0, 0.0, 0.5 * engine.model.decode.expected_s(said))
    return _Running(0, 0.0, 0.0)


def _num_told(engine: EngineView) -> int:
    """Tokens of the prompts that it told of, as far as they are to be counted.

    Where it is known since when it has been at them, that tells what it has done. Else those of
    ours are gone that we heard are computed; as what it had may have been computed in part when
    it told, no more is gone than it told of.
    """
    num_told = engine.work.num_prefill_tokens
    if engine.prefill_began_s is not None:
        return num_told
    return max(0, num_told - engine.num_computed_tokens)


def _queued(engine: EngineView, num_told: int, prompt: StepWork, num_passed: int) -> StepWork:
    """Prompts ahead of ours: what the worker told of, and what was sent since, less what ours
    passes. Of what was sent since, the lengths are taken to be ours.
    """
    since = engine.num_departed_tokens
    pairs = _part(_prompts(engine.work), num_told).num_attention_pairs
    pairs += round(since * prompt.num_attention_pairs / (prompt.num_prefill_tokens or 1))
    ahead = StepWork(num_prefill_tokens=num_told + since, num_attention_pairs=pairs)
    return _part(ahead, max(0, num_told + since - num_passed))


def _prompts(work: StepWork) -> StepWork:
    """Without what decodes."""
    return StepWork(0, 0, work.num_prefill_tokens, work.num_attention_pairs)


def _part(prompts: StepWork, num_tokens: int) -> StepWork:
    """Of prompts, so many tokens."""
    share = num_tokens / (prompts.num_prefill_tokens or 1)
    return StepWork(0, 0, num_tokens, round(share * prompts.num_attention_pairs))

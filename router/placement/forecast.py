"""When a request's first token would come from a worker, and how far apart the next. Pure.

A forecast is a function of what workers said on Watch and of what this router has sent them
since: the queue there is worked off in steps as long as the worker's own model of them says.
A payer's prompts are computed in the order in which they came, and payers take turns; what a step
has of one is bounded by the worker's budget, and what it has left is had by those that come behind.
"""

import math
from typing import Final, NamedTuple

from diptych.step_model import ENOUGH_FIXED, NINE_OF_TEN, StepWork
from router.placement.place import distance_ratio
from router.placement.views import DecodeView, EngineView, PrefillView

_SPREADS = NINE_OF_TEN / math.sqrt(2.0)  # as the error function counts them
_MOST_PREFILL_TIME = 0.9  # of its time, that a worker is taken to spend on prompts
_LONG_PROMPT_S = 2.5  # that one takes: of two of them it says little what prompts took of late
_LONGEST_SILENCE_S = 1.0  # between two messages of a worker
_NOTHING: Final = StepWork()


class Spread(NamedTuple):
    """The logarithm of how long something takes, spread evenly around the middle."""

    middle: float
    upper: float  # above that, what nine of ten do not exceed; 0: all take the same

    def miss_ratio(self, within_s: float) -> float:
        """How likely it takes longer."""
        if within_s <= 0.0:
            return 1.0
        middle, upper = self
        over = math.log(within_s) - middle
        return 0.5 * math.erfc(_SPREADS * over / upper) if upper else float(over < 0.0)


class Span(NamedTuple):
    """How long something takes: as expected, and what nine of ten do not exceed."""

    expected_s: float
    upper_s: float

    def later(self, more_s: float) -> "Span":
        """The same with so much more in any case."""
        return Span(self.expected_s + more_s, self.upper_s + more_s)

    def towards(self, other: "Span", part: float) -> "Span":
        """For that part of the time the other, and this before or after."""
        return Span(
            self.expected_s + part * (other.expected_s - self.expected_s),
            self.upper_s + part * (other.upper_s - self.upper_s),
        )

    @property
    def surely_s(self) -> float:
        """What no more than one of two hundred exceed."""
        return self.upper_s * self.upper_s / self.expected_s if self.expected_s > 0.0 else 0.0

    @property
    def spread(self) -> Spread:
        """If it is spread evenly around what is expected."""
        expected_s, upper_s = self
        if expected_s <= 0.0:
            return Spread(-math.inf, 0.0)
        middle = math.log(expected_s)  # their ratios may be too great, or too small
        is_spread = upper_s > expected_s
        return Spread(middle, max(0.0, math.log(upper_s) - middle) if is_spread else 0.0)

    def miss_ratio(self, within_s: float) -> float:
        """How likely it takes longer."""
        return self.spread.miss_ratio(within_s)


class PrefillForecast(NamedTuple):
    """A prompt on one worker, behind all that waits there."""

    first_token: Span
    own_s: float  # of that, the prompt's own steps
    num_own_steps: int

    def stall_s(self, step_s: float) -> float:
        """What each sequence there loses, which has a token with each of the prompt's steps, and
        one each ``step_s`` without it.
        """
        return max(0.0, self.own_s - self.num_own_steps * step_s)


def of_prefill(
    view: PrefillView | DecodeView, prompt: StepWork, now_s: float, num_passed: int = 0
) -> PrefillForecast | None:
    """What computing ``prompt`` takes there; None: the worker's steps are not known yet.

    ``num_passed`` tokens of others' prompts come behind it, but for a step's that has begun.
    """
    engine = _computing(view)
    if engine is None:
        return None
    running = _running(engine, now_s)
    left_s, since = running.left_s, _sent_since(engine, prompt)
    num_ahead = engine.work.num_prefill_tokens if running.is_timed else running.num_told
    num_passed = max(0, num_passed - engine.num_prompt_tokens)
    queued = _part(engine.work, num_ahead).plus(since)
    behind = _part(queued, max(0, queued.num_prefill_tokens - num_passed - running.num_tokens))
    if num_passed and left_s < 0.0 < running.step_s:
        left_s %= running.step_s  # the one that runs is another of those that it passes
    before_s, num_before = _steps_s(engine, behind)
    total_s, num_steps = _steps_s(engine, behind.plus(prompt))
    expected_s = left_s + total_s
    if left_s < 0.0:  # all that it told of may be over, but not what was sent since
        expected_s = max(expected_s, _steps_s(engine, since.plus(prompt))[0])
    if running.is_timed and engine.num_computed_tokens:
        # Some of ours are gone, and not all that are were computed.
        left = _part(engine.work, running.num_told)
        expected_s = min(expected_s, _steps_s(engine, left.plus(since).plus(prompt))[0])
    own_s, num_tokens = total_s - before_s, behind.num_prefill_tokens + prompt.num_prefill_tokens
    filled_s = _filled_up_s(engine, num_tokens, expected_s - own_s)
    first = Span(expected_s, expected_s * engine.model.prefill.upper_ratio).later(filled_s)
    return PrefillForecast(first, own_s, max(1, num_steps - num_before))


def computes_none_s(engine: EngineView | None) -> float:
    """From when it told on, for how long no prompt that it told of can be computed: half of what
    is left of its step, as steps vary; 0: not known.
    """
    if engine is None or engine.prefill_age_s is None or not engine.knows_prefill:
        return 0.0
    return 0.5 * max(0.0, _running(engine, engine.heard_s).left_s)


def queued_stall_s(view: DecodeView, num_tokens: int, step_s: float) -> float:
    """What each has yet to lose to prompts that are there, from when the worker told on.

    ``step_s``: what a token takes it without them. Those that were sent since are taken to have
    ``num_tokens``.
    """
    engine = _computing(view)
    if engine is None or not _has_prompts(engine):
        return 0.0
    queued = engine.work.plus(_sent_since(engine, StepWork.of_prompt(num_tokens, 0)))
    total_s, num_steps = _steps_s(engine, queued)
    is_at_them = engine.work.num_prefill_tokens and engine.prefill_age_s is not None
    over_s = max(0.0, engine.prefill_age_s or 0.0) if is_at_them else 0.0
    return max(0.0, total_s - num_steps * step_s - over_s)


class Queue(NamedTuple):
    """Prompts that wait on a worker, and the step that computes some. Seconds."""

    step_s: float = 0.0  # that runs; as much of it may be over as not
    behind_s: float = 0.0  # what comes behind it; where it is known, what is left of it, too


def of_prompts(view: DecodeView, now_s: float) -> Queue:
    """Those that it was given; none where that is not known."""
    engine = _computing(view)
    if engine is None or not _has_prompts(engine):
        return Queue()
    running, since = _running(engine, now_s), _sent_since(engine, _NOTHING)
    num_ahead = engine.work.num_prefill_tokens if running.is_timed else running.num_told
    queued = _part(engine.work, num_ahead).plus(since)
    behind_s, _ = _steps_s(engine, _part(queued, queued.num_prefill_tokens - running.num_tokens))
    if not running.is_timed:
        return Queue(running.step_s, behind_s)
    return Queue(0.0, max(running.left_s + behind_s, _steps_s(engine, since)[0]))


class DecodeForecast(NamedTuple):
    """The time between two tokens on one worker, without and with one sequence more."""

    num_rows: int  # sequences that are there, or were sent there
    before: Span
    after: Span


def of_decode(
    view: DecodeView, num_tokens: int, prompts_ratio: float | None = None
) -> DecodeForecast | None:
    """With one sequence of so many tokens more; None: the worker's steps are not known yet.

    Sequences that were sent there and do not run yet are taken to be as long. A worker of both
    roles spends ``prompts_ratio`` of its time on prompts, for which each token waits; None: see
    :func:`lasting_prompts_ratio`.
    """
    engine = view.engine
    if engine is None or not engine.knows_decode:
        return None
    cost, there = engine.model.decode, engine.decoding
    num_rows = max(view.num_sequences, there.num_decode_rows)
    ratio = lasting_prompts_ratio(view, num_tokens) if prompts_ratio is None else prompts_ratio
    left_ratio = 1.0 - min(ratio, _MOST_PREFILL_TIME)

    def pace(num: int) -> Span:
        num_context = there.num_context_tokens + (num - there.num_decode_rows) * num_tokens
        token_s = cost.decoding_s(num, num_context) / left_ratio
        return Span(token_s, token_s * cost.upper_ratio)

    return DecodeForecast(num_rows, pace(num_rows), pace(num_rows + 1))


def lasting_prompts_ratio(view: DecodeView, num_tokens: int) -> float:
    """What prompts will take of its time: as much as they did of late, but of an idle one less
    the longer a prompt of so many tokens takes there.

    A worker says it of the last five seconds or so. Of prompts that take as long it says only
    that one has just been there: an idle worker would look as if it hardly decoded, and requests
    be sent to the busy ones, or refused. Of short prompts it tells where more will come.
    """
    engine = view.engine
    is_idle = not (view.num_sequences or view.num_pending_tokens)
    if not is_idle or engine is None or not engine.knows_prefill:
        return view.prefill_time_ratio
    prompt_s = num_tokens * engine.model.prefill.prefill_token_s
    return view.prefill_time_ratio / (1.0 + (prompt_s / _LONG_PROMPT_S) ** 2)


def alone_s(view: DecodeView, num_tokens: int) -> float | None:
    """The time between tokens of one sequence of so many, alone there; None: it is not known."""
    engine = view.engine
    if engine is None or not engine.knows_decode:
        return None
    return engine.model.decode.decoding_s(1, num_tokens)


def _computing(view: PrefillView | DecodeView) -> EngineView | None:
    """Its engine; None: what it takes for prompts is not known."""
    engine = view.engine
    if engine is None or not engine.knows_prefill or not engine.max_batched_tokens:
        return None
    return engine


def _has_prompts(engine: EngineView) -> bool:
    """Whether it told of some, or was sent some since."""
    return bool(engine.work.num_prefill_tokens or engine.num_departed_tokens)


def _steps_s(engine: EngineView, prompts: StepWork) -> tuple[float, int]:
    """What computing ``prompts`` takes beside what decodes there, and in how many steps."""
    cost, (_, _, num_tokens, num_pairs) = engine.model.prefill, prompts
    num_steps = math.ceil(num_tokens / engine.num_prompt_tokens)
    own_s = num_tokens * cost.prefill_token_s + num_pairs * cost.attention_pair_s
    return num_steps * engine.prompt_step_s + own_s, num_steps


def _filled_up_s(engine: EngineView, num_tokens: int, wait_s: float) -> float:
    """What the last of the steps that compute so many takes longer for prompts that come behind
    them, which it has too: as many as came of late in ``wait_s``, until the first of ours.

    A worker that computes prompts all the time is sent as many as it computes. Most that have
    tokens enough for a step do not fill it up, unless sequences decode there.
    """
    cost, num_full = engine.model.prefill, engine.num_prompt_tokens
    if wait_s <= 0.0 or cost.prefill_token_s <= 0.0:
        return 0.0
    num_last = (num_tokens - 1) % num_full + 1
    left_s = (num_full - num_last) * cost.prefill_token_s
    if not engine.decoding.num_decode_rows:
        enough_s = ENOUGH_FIXED * cost.fixed_s
        left_s = min(left_s, max(0.0, enough_s - num_last * cost.prefill_token_s))
    full_s = num_full * cost.prefill_token_s
    come_s = engine.prefill_time_ratio * wait_s * full_s / (engine.prompt_step_s + full_s)
    return min(left_s, come_s)


def exposed_s(
    source: PrefillView,
    view: DecodeView,
    num_missing: int,
    num_computed: int,
    computed: PrefillForecast,
) -> float:
    """Of a pull of what is missing, what is left when the first token comes; a little less from
    nearby.

    The source computes the prompt's last ``num_computed`` tokens, and has the others from the
    beginning. What a step computed is pulled during the next one, so that of the last one is left,
    and what the link has not moved before.
    """
    bytes_per_s = view.bytes_per_s.get(source.worker.incarnation, 0.0)
    if not bytes_per_s:
        return 0.0
    byte_s = distance_ratio(source.place, view.place) / bytes_per_s
    num_steps, shipped = computed.num_own_steps, view.shipped
    num_last = math.ceil(num_computed / num_steps)
    all_s = own_s = last_s = byte_s * shipped.of(num_missing)
    if num_computed < num_missing:
        own_s = byte_s * shipped.of(num_computed)
    if num_last < num_missing:
        last_s = byte_s * shipped.of(num_last)
    own_late_s = own_s - last_s - computed.own_s * (num_steps - 1) / num_steps
    return last_s + max(0.0, own_late_s, all_s - last_s - computed.first_token.expected_s)


class _Running(NamedTuple):
    """The step that a worker is at."""

    num_told: int  # tokens of the prompts that it told of, less those of which we heard since
    is_timed: bool  # it said how long it had been at them
    num_tokens: int = 0  # of prompts, that the step computes
    step_s: float = 0.0  # what it takes, if it computes any
    left_s: float = 0.0  # of it, by expectation; below 0: steps behind it have begun so long ago


def _running(engine: EngineView, now_s: float) -> _Running:
    """By what it said, and the time since.

    Who does not say how long it has been at its prompts was half done with a step when it told. A
    step without prompts has its other half before it. One that takes longer than is known of them
    is about to end; what comes behind it may have begun since the worker told, no sooner.
    """
    said = engine.work
    num_told = max(0, said.num_prefill_tokens - engine.num_computed_tokens)
    is_timed = engine.prefill_age_s is not None and said.num_prefill_tokens > 0
    num_running = said.num_prefill_tokens if is_timed else num_told
    if num_running:
        num_tokens = min(engine.num_prompt_tokens, num_running)
        step_s, _ = _steps_s(engine, _part(said, num_tokens))
        if engine.prefill_age_s is None:
            return _Running(num_told, False, num_tokens, step_s, 0.5 * step_s)
        since_s = min(max(0.0, now_s - engine.heard_s), _LONGEST_SILENCE_S)
        if since_s + engine.prefill_age_s < 0.0:  # what comes until then is in it too
            return _Running(num_told, True, left_s=-engine.prefill_age_s - since_s)
        left_s = max(0.0, step_s - max(0.0, engine.prefill_age_s))
        since_s += min(0.0, engine.prefill_age_s)
        return _Running(num_told, True, num_tokens, step_s, left_s - since_s)
    if said.num_decode_rows and engine.knows_decode:
        return _Running(num_told, False, left_s=0.5 * engine.model.decode.expected_s(said))
    return _Running(num_told, False)


def _sent_since(engine: EngineView, prompt: StepWork) -> StepWork:
    """Of what this router sent since the worker told, the lengths are taken to be ours."""
    num_tokens = engine.num_departed_tokens
    if not num_tokens:
        return _NOTHING
    pairs = num_tokens * prompt.num_attention_pairs / (prompt.num_prefill_tokens or 1)
    return StepWork(0, 0, num_tokens, round(pairs))


def _part(work: StepWork, num_tokens: int) -> StepWork:
    """Of its prompts, so many tokens; of what decodes it may have anything."""
    if num_tokens == work.num_prefill_tokens:
        return work
    share = num_tokens / (work.num_prefill_tokens or 1)
    return StepWork(0, 0, num_tokens, round(share * work.num_attention_pairs))

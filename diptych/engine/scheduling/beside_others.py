"""What sequences that give way get of steps in which others decode. Pure.

Each token that a batch draws makes the step longer for everybody in it. So where others decode,
those that give way get no more of the engine's time, on average, than the promised time between
tokens leaves, or a quarter of what others take where nothing is promised: as batch weighs against
standard in a router's queue; and less than that where a time that one of the others asked for
leaves less. Steps without them pay for those with them. Rows sit such steps out,
and whoever was passed by for longest goes first; parts of their prompts, which cost far more, have
every other turn, which is the rows' where no prompt can use it. A promise leaves them a sixteenth
at the least, so nobody sits out for ever. Where nobody else decodes, nobody sits out.

Idea: a token bucket, in seconds, that may be overdrawn (deficit round robin).
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

from diptych.engine.scheduling import backlog
from diptych.engine.scheduling.sequence import Sequence
from diptych.engine.scheduling.step import StepPlan
from diptych.engine.scheduling.step_learner import num_told, work_of
from diptych.engine.scheduling.telling_time import TellingTime, most_told
from diptych.step_model import StepModel, StepWork

SHARE: Final = 0.25  # of the time that others take
LEAST_SHARE: Final = 1 / 16  # where the promise leaves less
_ROUNDING: Final = 1e-9  # of rows that fit exactly
_LEAST_PART_S: Final = 0.05  # of a part of a prompt; one that is shorter than what its step costs
# by itself would mostly waste it


class Allowed(NamedTuple):
    """To sequences that give way, of one step in which others decode."""

    max_rows: int  # of those in the batch that decode
    max_prompt_tokens: int | None  # None: as many as anywhere
    work: StepWork  # all that is to be computed, without what sits this step out
    max_rows_else: int = 0  # where prompts have none of it, though it is their turn


class BesideOthers:
    """What is saved and owed on one engine. Asked before each step, and told of each."""

    def __init__(self, tpot_s: float | None, telling_time: TellingTime | None = None) -> None:
        """``tpot_s``: the time between tokens, on average, that is promised to all others.
        ``telling_time``: the engine's; without it nothing is known of that.
        """
        self._tpot_s = tpot_s
        self._telling_time = telling_time or TellingTime()
        self._saved_s = 0.0  # by steps without them; less than 0: overdrawn
        self._is_prompts_turn = False
        self._offered_to_rows = True  # by the last answer

    @property
    def is_overdrawn(self) -> bool:
        """Whether steps without them still pay for those with them."""
        return self._saved_s < 0.0

    def allowed(self, runnable: Iterable[Sequence], model: StepModel) -> Allowed | None:
        """Of the step that is decided now; None: no bound. Asking alone counts nothing."""
        seqs = list(runnable)
        if not any(seq.is_decoding and not seq.yields for seq in seqs) or not model.decode.is_known:
            return None
        giving = backlog.work(seq for seq in seqs if seq.gives_way)
        if not any(giving):
            return None
        others = backlog.work(seq for seq in seqs if not seq.gives_way)
        decodes = others.without_prompts
        asked_s = _asked_s((seq for seq in seqs if seq.is_decoding), decodes, model)
        left_s = self._saved_s + self._left_s(decodes, model, asked_s)
        if others.num_prefill_tokens and self._tpot_s is not None:  # what is left is for these
            left_s = min(left_s, self._saved_s + LEAST_SHARE * model.decode.expected_s(decodes))
        if left_s <= 0.0:
            return Allowed(0, 0, others)
        rows = giving.num_decode_rows
        context = giving.num_context_tokens / max(1, rows)
        num_fitting = model.decode.more_rows(left_s, decodes.num_decode_rows, context)
        num_rows = min(rows, max(1, int(min(rows, num_fitting + _ROUNDING))))
        has_prompts = bool(giving.num_prefill_tokens) and not others.num_prefill_tokens
        is_prompts_turn = not rows or (self._is_prompts_turn and has_prompts)
        self._offered_to_rows = not is_prompts_turn
        if is_prompts_turn:
            prompts = giving._replace(num_decode_rows=0, num_context_tokens=0)
            prompt_seqs = [seq for seq in seqs if seq.gives_way and not seq.is_decoding]
            most = self._max_prompt_tokens(left_s, decodes, prompt_seqs, model)
            return Allowed(0, most, others.plus(prompts), num_rows)
        return Allowed(num_rows, 0, others.plus(StepWork(num_rows, round(num_rows * context))))

    def count_step(self, plan: StepPlan, owners: Iterable[Sequence], model: StepModel) -> None:
        """A step was decided by the last answer; ``owners`` are those of its chunks, in order."""
        chunks = list(zip(owners, plan.chunks, strict=True))
        if not any(len(chunk.token_ids) == 1 and not seq.yields for seq, chunk in chunks):
            self._saved_s = 0.0
            return
        of_others = StepPlan(chunks=tuple(chunk for seq, chunk in chunks if not seq.gives_way))
        others, told = work_of(of_others), num_told(plan) - num_told(of_others)
        decoding = (seq for seq, chunk in chunks if len(chunk.token_ids) == 1)
        asked_s = _asked_s(decoding, others, model)
        work, left_s = work_of(plan), self._left_s(others, model, asked_s)
        took_s = model.cost_of(work).expected_s(work) + self._telling_s(told, model)
        cost_s = max(0.0, took_s - model.cost_of(others).expected_s(others))
        if self._saved_s + left_s > 0.0:
            self._is_prompts_turn = self._offered_to_rows
        self._saved_s = min(left_s, self._saved_s + left_s - cost_s)

    def _left_s(self, others: StepWork, model: StepModel, asked_s: float | None) -> float:
        """That a step leaves which has so much of others, one of which asked for a pace."""
        cost = model.cost_of(others)
        alone_s = cost.expected_s(others)
        upper_s = alone_s * cost.upper_ratio
        left_s = SHARE * alone_s if self._tpot_s is None else self._tpot_s - upper_s
        if asked_s is not None:
            left_s = min(left_s, asked_s - upper_s)
        return max(left_s, LEAST_SHARE * alone_s)

    def _max_prompt_tokens(
        self, left_s: float, decodes: StepWork, prompts: list[Sequence], model: StepModel
    ) -> int | None:
        cost = model.prefill
        if not cost.is_known or not cost.prefill_token_s:
            return None
        constant_s = cost.expected_s(decodes) - model.decode.expected_s(decodes)
        part_s = max(left_s - constant_s, constant_s, _LEAST_PART_S)
        most = max(1, int(part_s / cost.prefill_token_s))
        there_are = min(most, sum(seq.num_pending_tokens for seq in prompts))
        told = most_told(prompts, there_are)
        token_s = cost.prefill_token_s + self._telling_s(told, model) / there_are
        return max(1, int(part_s / token_s))

    def _telling_s(self, num_told: int, model: StepModel) -> float:
        return self._telling_time.expected_s(num_told, model.prefill.prefill_token_s)


def _asked_s(decoding: Iterable[Sequence], others: StepWork, model: StepModel) -> float | None:
    """The shortest time between tokens that one of these asked for: of those that do not yield,
    and that would have it if others had each step for themselves."""
    alone_s = model.decode.expected_s(others)
    paces = (seq.tpot_s for seq in decoding if not seq.yields)
    return min((pace_s for pace_s in paces if pace_s and pace_s >= alone_s), default=None)

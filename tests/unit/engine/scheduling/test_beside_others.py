"""Beside others that decode, a batch gets what their pace leaves, and always something."""

import math
from itertools import pairwise

import pytest

from diptych.engine.scheduling.beside_others import LEAST_SHARE, SHARE, Allowed, BesideOthers
from diptych.engine.scheduling.report import LogprobsReport
from diptych.engine.scheduling.sequence import Sequence, SequenceState
from diptych.engine.scheduling.step import SampledToken, StepOutput, StepPlan
from diptych.engine.scheduling.step_learner import num_told, work_of
from diptych.engine.scheduling.telling_time import TellingTime
from diptych.step_model import NUM_KNOWN_STEPS, StepCost, StepModel, StepWork
from tests.unit.engine.scheduling.steps import (
    make_scheduler,
    make_sequence,
    start_handed_over,
    start_local,
)

ROW_S = 0.008
TOLD_S = 0.007  # of a token of a prompt that is told of, beside what it takes anyway
MODEL = StepModel(
    StepCost(0.012, ROW_S, 0.0, 0.0, 0.0, 1.0, NUM_KNOWN_STEPS),
    StepCost(0.032, ROW_S, 0.0, 0.001, 0.0, 1.0, NUM_KNOWN_STEPS),
)
ALONE_S = MODEL.decode.expected_s(StepWork(1))


class Run:
    """A scheduler whose steps take what the model says, by a clock that only they move."""

    def __init__(
        self,
        *,
        tpot_s: float | None = None,
        model: StepModel = MODEL,
        is_bounded: bool = True,
        max_num_seqs: int = 64,
    ) -> None:
        self.scheduler = make_scheduler(4096, max_model_len=2000, max_num_seqs=max_num_seqs)
        self.telling = TellingTime()
        self.telling.add(1, TOLD_S, MODEL.prefill.prefill_token_s)
        self.beside = BesideOthers(tpot_s, self.telling)
        self.model = model
        self.is_bounded = is_bounded
        self.now_s = 0.0
        self.num_steps = 0
        self.most_rows = 0  # of those that yield, in one step
        self.token_times: dict[Sequence, list[float]] = {}

    def start(
        self,
        *,
        yields: bool,
        num_tokens: int = 4,
        num_output_tokens: int = 100,
        tpot_s: float = 0.0,
    ) -> Sequence:
        number = len(self.token_times) + 1
        seq = make_sequence([number] * num_tokens, max_tokens=num_output_tokens)
        seq.yields, seq.tpot_s = yields, tpot_s
        self.token_times[seq] = []
        return start_local(self.scheduler, seq)

    def started(
        self, *, yields: bool, num_output_tokens: int = 100, tpot_s: float = 0.0
    ) -> Sequence:
        """One that decodes."""
        seq = self.start(yields=yields, num_output_tokens=num_output_tokens, tpot_s=tpot_s)
        while not self.token_times[seq]:
            self.step()
        return seq

    def allowed(self) -> Allowed | None:
        return self.beside.allowed(self.scheduler.runnable, self.model)

    def step(self) -> StepPlan:
        allowed = self.allowed() if self.is_bounded else None
        plan = self.scheduler.schedule(beside_others=allowed, now_s=self.now_s)
        assert plan is not None
        owners = self.scheduler.owners(plan)
        self.beside.count_step(plan, owners, self.model)
        self.num_steps += 1
        self.most_rows = max(self.most_rows, sum(seq.yields for seq in owners))
        work = work_of(plan)
        self.now_s += MODEL.cost_of(work).expected_s(work) + num_told(plan) * TOLD_S
        tokens = tuple(
            SampledToken(sum(seq.token_ids) % 97, math.nan) if chunk.sample else None
            for seq, chunk in zip(owners, plan.chunks, strict=True)
        )
        for update in self.scheduler.update(plan, StepOutput(tokens=tokens, duration_s=0.0)):
            if update.token is not None:
                self.token_times[update.sequence].append(self.now_s)
        return plan

    def finish(self, seq: Sequence) -> None:
        while seq.state is not SequenceState.FINISHED:
            self.step()

    def pace_s(self, seq: Sequence) -> float:
        """The time between tokens, on average."""
        times = self.token_times[seq]
        return (times[-1] - times[0]) / (len(times) - 1)

    def num_tokens(self, seqs: list[Sequence]) -> list[int]:
        return [seq.num_output_tokens for seq in seqs]


def beside_sixteen(
    run: Run, num_output_tokens: int = 100, tpot_s: float = 0.0
) -> tuple[Sequence, list[Sequence]]:
    """One that decodes beside rows of a batch, to its end; ``tpot_s``: that it asked for."""
    rows = [run.started(yields=True, num_output_tokens=1000) for _ in range(16)]
    other = run.started(yields=False, num_output_tokens=num_output_tokens, tpot_s=tpot_s)
    run.finish(other)
    return other, rows


def test_rows_of_a_batch_take_a_quarter_of_what_others_take() -> None:
    run = Run()
    other, _ = beside_sixteen(run)
    assert run.pace_s(other) <= (1 + SHARE) * ALONE_S + ROW_S / 99
    unbound = Run(is_bounded=False)
    other, _ = beside_sixteen(unbound)
    assert unbound.pace_s(other) > 7 * ALONE_S


def test_rows_sit_out_the_first_step_of_one_that_was_handed_over() -> None:
    run = Run()
    for _ in range(16):
        run.started(yields=True)
    other = make_sequence([99] * 7)
    run.token_times[other] = []
    start_handed_over(run.scheduler, other)
    run.most_rows = 0
    run.step()
    assert other.num_output_tokens == 2
    assert run.most_rows == 1


def test_a_short_answer_does_not_wait_for_all_rows_at_once() -> None:
    run = Run()
    other, _ = beside_sixteen(run, 16)
    times = run.token_times[other]
    longest_s = max(after - before for before, after in pairwise(times))
    assert longest_s == pytest.approx(ALONE_S + ROW_S)
    assert times[-1] - times[0] <= 15 * (1 + SHARE) * ALONE_S + ROW_S


def test_rows_that_cost_more_beyond_some_are_fewer() -> None:
    """Beside one that decodes the second costs 1 ms, and each further one 8: 37 ms are left."""
    run = Run()
    for _ in range(16):
        run.started(yields=True, num_output_tokens=1000)
    run.started(yields=False)
    decode = StepCost(0.012, 0.001, num_steps=NUM_KNOWN_STEPS, more_row_s=(0.007,))
    model = MODEL._replace(decode=decode)
    allowed = BesideOthers(0.05).allowed(run.scheduler.runnable, model)
    assert allowed is not None
    assert allowed.max_rows == 1 + int(36 / 8)
    assert decode.expected_s(allowed.work) <= 0.05


def test_rows_take_turns_and_none_is_left_behind() -> None:
    run = Run()
    rows = [run.started(yields=True, num_output_tokens=1000) for _ in range(5)]
    before = run.num_tokens(rows)
    other = run.started(yields=False, num_output_tokens=80)
    run.finish(other)
    got = [now - then for now, then in zip(run.num_tokens(rows), before, strict=True)]
    assert min(got) >= 9
    assert max(got) - min(got) <= 1
    assert not any(seq.has_aged for seq in rows)
    assert run.scheduler.num_sat_out > 0


def test_texts_are_the_same_whoever_sat_out() -> None:
    def texts(is_bounded: bool) -> list[list[int]]:
        run = Run(is_bounded=is_bounded)
        seqs = [run.started(yields=bool(number % 3), num_output_tokens=40) for number in range(7)]
        for seq in seqs:
            run.finish(seq)
        assert bool(run.scheduler.num_sat_out) is is_bounded
        return [seq.token_ids for seq in seqs]

    assert texts(is_bounded=True) == texts(is_bounded=False)


def test_where_nobody_else_decodes_all_rows_go() -> None:
    run = Run()
    other, rows = beside_sixteen(run)
    assert run.allowed() is None
    assert len(run.step().chunks) == len(rows)
    assert other.state is SequenceState.FINISHED


@pytest.mark.parametrize(
    ("tpot_s", "pace_s"),
    [
        (0.05, 0.05),  # leaves time for three or four rows a step
        (0.2, ALONE_S + 16 * ROW_S),  # for all of them
        (0.02, (1 + LEAST_SHARE) * ALONE_S),  # for none
    ],
)
def test_what_is_promised_says_how_many_rows_there_are(tpot_s: float, pace_s: float) -> None:
    run = Run(tpot_s=tpot_s)
    other, rows = beside_sixteen(run)
    assert run.pace_s(other) == pytest.approx(pace_s, rel=0.04)
    assert run.pace_s(other) <= pace_s + ROW_S / 90
    assert min(run.num_tokens(rows)) >= 1


@pytest.mark.parametrize(
    ("tpot_s", "pace_s"),
    [
        (0.0225, 0.0225),  # leaves less than a quarter
        (0.05, (1 + SHARE) * ALONE_S),  # leaves more, of which a batch gets no more than that
        (0.015, (1 + SHARE) * ALONE_S),  # it could not have that alone
        (ALONE_S, (1 + LEAST_SHARE) * ALONE_S),
    ],
)
def test_a_pace_that_was_asked_for_leaves_a_batch_less(tpot_s: float, pace_s: float) -> None:
    run = Run()
    other, rows = beside_sixteen(run, tpot_s=tpot_s)
    assert run.pace_s(other) == pytest.approx(pace_s, rel=0.02)
    assert run.pace_s(other) <= pace_s + ROW_S / 90
    assert min(run.num_tokens(rows)) >= 1


def test_the_tightest_pace_counts_and_a_batch_asks_for_none() -> None:
    run = Run(tpot_s=0.2)
    for _ in range(16):
        run.started(yields=True, num_output_tokens=1000, tpot_s=0.03)
    others = [run.started(yields=False, tpot_s=tpot_s) for tpot_s in (0.1, 0.05, 0.0)]
    run.finish(others[1])
    assert run.pace_s(others[1]) == pytest.approx(0.05, rel=0.05)


def test_a_promise_is_spent_on_others_prompts_first() -> None:
    run = Run(tpot_s=0.05)
    for _ in range(4):
        run.started(yields=True)
    run.started(yields=False)
    before = run.allowed()
    assert before is not None
    assert before.max_rows > 1
    run.start(yields=False, num_tokens=600)
    allowed = run.allowed()
    assert allowed is not None
    assert allowed.max_rows <= 1


def test_a_prompt_of_a_batch_has_every_other_turn_and_is_paid_for() -> None:
    run = Run()
    row = run.started(yields=True, num_output_tokens=1000)
    other = run.started(yields=False, num_output_tokens=400)
    prompt = run.start(yields=True, num_tokens=600, num_output_tokens=1)
    num_before, most = row.num_output_tokens, 0
    while prompt.state is not SequenceState.FINISHED:
        plan = run.step()
        lengths = [len(chunk.token_ids) for chunk in plan.chunks]
        assert max(lengths) == 1 or len(plan.chunks) == 2, "alone beside others"
        most = max(most, *lengths)
    assert 1 < most <= 52  # 50 ms, more than the constant of such a step, by whole blocks
    assert row.num_output_tokens >= num_before + 600 // 52
    run.finish(other)
    assert run.pace_s(other) <= (1 + SHARE) * ALONE_S + 0.1 / 399


def test_what_a_prompt_of_a_batch_tells_is_paid_for_as_well() -> None:
    run = Run()
    other = run.started(yields=False, num_output_tokens=900)
    prompt = make_sequence([2] * 200, prefill_only=True)
    prompt.yields, prompt.report = True, LogprobsReport(101, 200, 0)
    run.token_times[prompt] = []
    run.scheduler.add_prefill(prompt)
    most = most_told = 0
    while prompt.state is not SequenceState.LEASED:
        plan = run.step()
        most = max(most, *(len(chunk.token_ids) for chunk in plan.chunks))
        most_told = max(most_told, num_told(plan))
    assert most > 30, "of what it does not tell"
    assert 1 < most_told <= 0.05 / (0.001 + TOLD_S)
    overdrawn_s = 0.02 + 0.05  # by the last part, and what its step costs by itself
    num_steps = other.num_output_tokens - 1
    assert run.pace_s(other) <= (1 + SHARE) * ALONE_S + overdrawn_s / num_steps


def test_part_of_a_prompt_is_no_smaller_than_what_its_step_costs() -> None:
    costly = MODEL._replace(prefill=MODEL.prefill._replace(fixed_s=0.212))
    run = Run(model=costly)
    run.started(yields=False)
    run.start(yields=True, num_tokens=600)
    allowed = run.allowed()
    assert allowed is not None
    assert allowed.max_prompt_tokens == 200
    assert allowed.max_rows == 0


def test_a_prompt_that_cannot_use_its_turn_holds_no_row_up() -> None:
    """It waits for a place in the batch."""
    run = Run(max_num_seqs=2)
    row = run.started(yields=True, num_output_tokens=1000)
    run.started(yields=False, num_output_tokens=400)
    prompt = run.start(yields=True, num_tokens=600)
    for _ in range(60):
        run.step()
    assert not prompt.num_computed_tokens
    assert row.num_output_tokens >= 10


def test_rows_that_left_their_places_in_vain_sit_out_by_turns_like_any() -> None:
    """Others' prompts wait for the places, and for a step that may have parts of prompts."""
    run = Run(max_num_seqs=8)
    rows = [run.started(yields=True, num_output_tokens=1000) for _ in range(4)]
    for _ in range(4):
        run.started(yields=False, num_output_tokens=400)
    for _ in range(4):
        run.start(yields=False, num_tokens=600)
    before = run.num_tokens(rows)
    for number in range(1, 9):
        now_s = run.now_s + number / 10
        plan = run.scheduler.schedule(0, beside_others=Allowed(1, 0, StepWork()), now_s=now_s)
        assert plan is not None
        assert len(plan.chunks) == 5
        run.scheduler.update(plan, StepOutput(tokens=(SampledToken(7, 0.0),) * 5, duration_s=0.0))
        assert sum(run.num_tokens(rows)) == sum(before) + number
    assert run.num_tokens(rows) == [num + 2 for num in before]


def test_rows_have_the_turn_of_a_prompt_that_cannot_use_it() -> None:
    """All of them, where the promise leaves as much."""
    run = Run(max_num_seqs=4, tpot_s=0.2)
    rows = [run.started(yields=True, num_output_tokens=1000) for _ in range(3)]
    run.started(yields=False, num_output_tokens=400)
    prompt = run.start(yields=True, num_tokens=600)
    before = run.num_tokens(rows)
    for _ in range(40):
        run.step()
    assert not prompt.num_computed_tokens
    assert run.num_tokens(rows) == [num + 40 for num in before]


def test_nothing_is_bound_while_nobody_knows_how_long_steps_take() -> None:
    run = Run(model=StepModel())
    run.started(yields=True)
    run.started(yields=False)
    assert run.allowed() is None
    assert len(run.step().chunks) == 2


def test_aged_rows_go_with_each_step_and_hold_no_others_of_a_batch_back() -> None:
    run = Run()
    rows = [run.started(yields=True) for _ in range(3)]
    rows[0].has_aged = True
    assert run.allowed() is None, "only others of a batch decode"
    run.started(yields=False)
    before = run.num_tokens(rows)
    for _ in range(8):
        run.step()
    got = [now - then for now, then in zip(run.num_tokens(rows), before, strict=True)]
    assert got[0] == 8
    assert sum(got[1:]) < 8


def test_what_is_left_unused_is_not_saved_up() -> None:
    run = Run()
    run.started(yields=False, num_output_tokens=1000)
    for _ in range(50):
        run.step()
    for _ in range(16):
        run.started(yields=True)
    run.most_rows = 0
    for _ in range(40):
        run.step()
    assert run.most_rows == 1


def test_a_row_after_many_steps_without_any_gets_its_share_and_no_more() -> None:
    run = Run()
    run.started(yields=False, num_output_tokens=1000)
    for _ in range(50):
        run.step()
    row = run.start(yields=True)
    run.finish(run.start(yields=False, num_output_tokens=40))
    assert row.num_output_tokens <= 40 * SHARE * (ALONE_S + ROW_S) / ROW_S + 1


def test_what_a_batch_owes_is_forgotten_where_nobody_else_decodes() -> None:
    run = Run()
    row = run.started(yields=True, num_output_tokens=1000)
    other = run.started(yields=False, num_output_tokens=1000)
    run.start(yields=True, num_tokens=600)
    while not run.beside.is_overdrawn:
        run.step()
    run.scheduler.release(other)
    run.step()
    assert not run.beside.is_overdrawn
    num_before = row.num_output_tokens
    run.start(yields=False)
    run.step()
    assert row.num_output_tokens == num_before + 1


def test_a_prompt_that_nobody_decodes_beside_bounds_no_batch() -> None:
    run = Run()
    for _ in range(4):
        run.started(yields=True)
    run.start(yields=False, num_tokens=600)
    assert run.allowed() is None


def test_without_a_promise_prompts_of_others_take_nothing_of_a_batchs_share() -> None:
    run = Run()
    for _ in range(4):
        run.started(yields=True)
    for _ in range(12):
        run.started(yields=False)
    for _ in range(2):
        allowed = BesideOthers(None).allowed(run.scheduler.runnable, MODEL)
        assert allowed is not None
        assert allowed.max_rows == 3, "27 ms, of 8 each"
        run.start(yields=False, num_tokens=600)

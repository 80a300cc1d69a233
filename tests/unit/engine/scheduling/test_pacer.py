"""Prompts beside sequences that decode: a step has of them what the promised pace leaves."""

import math
from collections.abc import Sequence as Many
from concurrent.futures import Future

import pytest

from diptych.engine.scheduling.block_pool import BlockPool
from diptych.engine.scheduling.pacer import LENT, Pacer
from diptych.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from diptych.engine.scheduling.sequence import Sequence, SequenceKey, SequenceState
from diptych.engine.scheduling.step import SampledToken, StepOutput
from diptych.engine.scheduling.step_learner import work_of
from diptych.paced import Paced
from diptych.sampling_params import SamplingParams
from diptych.step_model import NUM_KNOWN_STEPS, StepCost, StepModel, StepWork

BUDGET, TPOT_S = 512, 0.1
MODEL = StepModel(
    StepCost(0.04, 0.002, 0.0, 0.0, 0.0, 1.0, NUM_KNOWN_STEPS),
    StepCost(0.06, 0.002, 0.0, 0.001, 0.0, 1.25, NUM_KNOWN_STEPS),
)
PROMPTS = StepWork(num_decode_rows=2, num_prefill_tokens=5000, num_attention_pairs=0)


def make_sequence(
    num_prompt_tokens: int,
    num_output_tokens: int = 400,
    *,
    tpot_s: float = 0.0,
    expected: int = 0,
    yields: bool = False,
    due_s: float = math.inf,
) -> Sequence:
    return Sequence(
        key=SequenceKey("router", num_prompt_tokens),
        token_ids=[1] * num_prompt_tokens,
        num_prompt_tokens=num_prompt_tokens,
        sampling=SamplingParams(max_tokens=num_output_tokens),
        tpot_s=tpot_s,
        num_expected_tokens=expected,
        yields=yields,
        due_s=due_s,
    )


def test_who_decodes_and_asked_for_a_pace_is_told_of_with_how_far_it_is() -> None:
    """Not whom only the worker's own promise is for, no batch, and nobody who ended."""
    pacer = Pacer(TPOT_S, BUDGET)
    asking, ended = make_sequence(9, tpot_s=0.05, expected=30), make_sequence(9, tpot_s=0.05)
    others = [make_sequence(9), make_sequence(9, tpot_s=0.05, yields=True)]
    for seq in (asking, ended, *others):
        seq.token_ids += [1]  # its first
    pacer.note([asking, ended, *others], 10.0)
    assert pacer.paced(10.0) == [
        Paced(0.05, 0.0, 0, 29, *asking.key),
        Paced(0.05, 0.0, 0, 1, *ended.key),
    ]
    for seq in (asking, ended, *others):
        seq.token_ids += [1] * 8
    ended.state = SequenceState.FINISHED
    assert pacer.paced(10.25) == [Paced(0.05, 0.25, 8, 21, *asking.key)]
    pacer.note([], 11.0)  # it lost its place, and begins anew: what is to come is what is left
    pacer.note([asking], 12.0)
    asking.token_ids += [1]
    assert pacer.paced(12.5) == [Paced(0.05, 0.5, 1, 20, *asking.key)]


def test_who_was_handed_over_has_waited_since_its_first_token() -> None:
    """Once: if it loses its place and begins anew, from then on."""
    pacer, seq = Pacer(None, BUDGET), make_sequence(9, tpot_s=0.05, expected=30)
    seq.token_ids += [1]
    seq.emitted_s = 9.75
    pacer.note([seq], 10.0)
    assert pacer.paced(10.25) == [Paced(0.05, 0.5, 0, 29, *seq.key)]
    pacer.note([], 11.0)
    pacer.note([seq], 12.0)
    assert pacer.paced(12.25) == [Paced(0.05, 0.25, 0, 29, *seq.key)]
    early = make_sequence(9, tpot_s=0.05)
    early.emitted_s = 13.0  # by a step that is planned ahead
    pacer.note([early], 12.5)
    assert pacer.paced(12.75)[0].decoding_s == 0.25


def test_who_goes_on_behind_tokens_drawn_elsewhere_has_so_many_fewer_to_come() -> None:
    pacer, seq = Pacer(None, BUDGET), make_sequence(9, tpot_s=0.05, expected=528)
    seq.token_ids += [1] * 400
    pacer.note([seq], 10.0)
    seq.token_ids += [1] * 20
    assert pacer.paced(11.0) == [Paced(0.05, 1.0, 20, 108, *seq.key)]


@pytest.mark.parametrize(
    ("of_all_s", "own_s"), [(TPOT_S, 0.0), (None, TPOT_S), (9.0, TPOT_S), (TPOT_S, 9.0)]
)
def test_the_largest_part_that_nine_of_ten_times_leaves_the_first_who_owes_on_time(
    of_all_s: float | None, own_s: float
) -> None:
    """Of what it brings, or of what is promised to all: the tighter."""
    pacer = Pacer(of_all_s, BUDGET)
    first, second = make_sequence(9, tpot_s=own_s), make_sequence(10, tpot_s=own_s)
    both = [first, second]
    assert asked(pacer, both, 0.0) == 0  # 0.16 s with 64 tokens
    first.token_ids += [1] * 8  # and owes the next at 0.9 s
    second.token_ids += [1] * 16
    sizes = [asked(pacer, both, now_s) for now_s in (0.1, 0.4, 0.55, 0.7, 0.8)]
    assert sizes == [512, 256, 128, 64, 0]


@pytest.mark.parametrize("tardy", [False, True])
def test_whoever_cannot_be_on_time_any_more_holds_nobody_up(tardy: bool) -> None:
    pacer, seq = Pacer(TPOT_S, BUDGET), make_sequence(9)
    asked(pacer, [seq], 0.0)
    now_s = 0.06 if tardy else 0.05  # it owes a token at 0.1 s; a step takes 0.044 s at the least
    expected = None if tardy else 0
    assert asked(pacer, [seq], now_s) == expected


def test_who_owes_first_counts() -> None:
    pacer = Pacer(None, BUDGET)
    tight, wide, free = (make_sequence(9 + n, tpot_s=each) for n, each in enumerate((0.1, 0.7, 0)))
    assert asked(pacer, [wide, free], 0.0) == 256
    assert asked(pacer, [tight, wide, free], 0.0) == 0
    assert asked(pacer, [tight, wide, free], 0.06) == 256, "the first is late in any case"
    assert asked(pacer, [free], 0.1) is None


def test_it_spends_most_of_what_it_gains_by_tokens_that_are_expected() -> None:
    """A step alone takes 0.044 s, so each of nine tokens more gains 0.056 s; 64 take 0.16 s."""
    for expected, size in ((0, 0), (2, 0), (3, 64), (6, 128), (60, 512)):
        seq = make_sequence(9, tpot_s=0.1, expected=expected)
        left_s = 0.1 + LENT * 0.056 * max(0, expected - 1)
        assert (left_s >= 0.16) is (size > 0)
        assert asked(Pacer(None, BUDGET), [seq], 0.0) == size
    pacer, seq = Pacer(None, BUDGET), make_sequence(9, tpot_s=0.1, expected=10)
    pacer.note([seq], 0.0)
    seq.token_ids += [1] * 9
    assert asked(pacer, [seq], 0.9) == 0, "the last is to come"
    seq.token_ids += [1] * 9
    assert asked(pacer, [seq], 1.8) == 0, "more than was expected lend nothing"


def test_what_is_promised_to_all_is_not_lent() -> None:
    pacer, seq = Pacer(0.1, BUDGET), make_sequence(9, tpot_s=0.1, expected=60)
    assert asked(pacer, [seq], 0.0) == 0
    assert asked(Pacer(0.7, BUDGET), [make_sequence(9, tpot_s=0.1, expected=60)], 0.0) == 256


def test_a_batch_is_promised_nothing() -> None:
    seq = make_sequence(9, tpot_s=TPOT_S, yields=True)
    assert asked(Pacer(TPOT_S, BUDGET), [seq], 0.0) is None


WAITS = 200  # tokens of a prompt: 0.264 s, and nine of ten times no more than 0.33 s


@pytest.mark.parametrize(
    ("due_s", "size"),
    [
        (0.33 + 0.37, 0),  # half of this it can wait, and in 0.181 s the row gains 0.23 s
        (0.33 + 0.35, None),
        (0.27, None),
        (0.25, 0),  # it is late in any case, as is the next
        (-1.0, 0),
        (math.inf, 0),
    ],
)
def test_who_asked_for_a_pace_gives_way_to_a_first_token_that_would_be_late(
    due_s: float, size: int | None
) -> None:
    seq, prompt = make_sequence(9, tpot_s=0.1), make_sequence(WAITS, due_s=5.0 + due_s)
    work = StepWork(2, 0, WAITS)
    assert asked(Pacer(None, BUDGET), [seq], 5.0, [prompt], work) == size
    assert asked(Pacer(0.1, BUDGET), [seq], 5.0, [prompt], work) == 0, "this is promised to all"
    yielding = make_sequence(WAITS, due_s=5.0 + due_s, yields=True)
    assert asked(Pacer(None, BUDGET), [seq], 5.0, [yielding], work) is None, "see beside_others.py"
    yielding.has_aged = True
    assert asked(Pacer(None, BUDGET), [seq], 5.0, [yielding], work) == size
    drawn = make_sequence(WAITS - 1, due_s=5.0 + due_s)
    drawn.token_ids.append(1)
    assert asked(Pacer(None, BUDGET), [seq], 5.0, [drawn], work) == 0, "its first token has come"


@pytest.mark.parametrize(
    ("num_more", "can_wait_s", "size"),
    [(3, 0.14, 64), (3, 0.12, None), (1, 0.09, 0), (1, 0.08, None), (90, 0.05, 512)],
)
def test_a_prompt_waits_for_answers_that_end_soon(
    num_more: int, can_wait_s: float, size: int | None
) -> None:
    """For two steps at the least; and for nobody who can spend what a long answer gains."""
    seq = make_sequence(9, tpot_s=0.1, expected=100)
    seq.token_ids += [1] * (100 - num_more)
    prompt = make_sequence(WAITS, due_s=0.33 + 2 * can_wait_s)
    work = StepWork(2, 0, WAITS)
    assert asked(Pacer(None, BUDGET), [seq], 0.0, [prompt], work) == size


def test_who_could_not_be_waited_for_costs_nobody_else_their_pace() -> None:
    """A row that gains 0.006 s by each token, beside one that has 0.7 s."""
    prompt, work = make_sequence(WAITS * 5, due_s=3.0), StepWork(2, 0, WAITS * 5)
    hopeless, other = make_sequence(9, tpot_s=0.05), make_sequence(10, tpot_s=0.7)
    assert asked(Pacer(None, BUDGET), [hopeless], 0.0, [prompt], work) is None
    assert asked(Pacer(None, BUDGET), [other], 0.0, [prompt], work) == 256
    assert asked(Pacer(None, BUDGET), [hopeless, other], 0.0, [prompt], work) == 256


def test_a_prompt_that_is_not_prepared_costs_nobody_their_pace() -> None:
    """No step computes a part of it yet, whatever others have of it."""
    seq, other = make_sequence(9, tpot_s=0.1), make_sequence(WAITS, due_s=10.0)
    urgent = make_sequence(WAITS, due_s=0.33 + 0.35)
    urgent.preparation = preparing = Future[None]()
    work = StepWork(2, 0, 2 * WAITS)
    assert asked(Pacer(None, BUDGET), [seq], 0.0, [urgent, other], work) == 0
    preparing.set_result(None)
    assert asked(Pacer(None, BUDGET), [seq], 0.0, [urgent, other], work) is None


@pytest.mark.parametrize("expected", [0, 1, 100])
def test_a_pace_that_is_just_that_of_steps_alone_is_never_gained_on(expected: int) -> None:
    """Only its end can be waited for, if that is expected at all."""
    alone_s = MODEL.decode.expected_s(StepWork(2))
    prompt, work = make_sequence(WAITS, due_s=1.0), StepWork(2, 0, WAITS)
    for tpot_s in (alone_s, math.nextafter(alone_s, 1.0)):
        seq = make_sequence(9, tpot_s=tpot_s, expected=expected)
        size = asked(Pacer(None, BUDGET), [seq], 0.0, [prompt], work)
        assert size == (0 if expected == 1 else None)


def test_a_long_prompt_takes_as_many_steps_as_it_has_parts() -> None:
    """2,000 tokens beside two rows are four steps of 510: 2.256 s, nine of ten times 2.82 s."""
    seq, work = make_sequence(9, tpot_s=0.1), StepWork(2, 0, 2000)
    wait_s = (0.72 - 0.1) / 0.056 * 0.044
    for more_s, size in ((0.01, 0), (-0.01, None)):
        prompt = make_sequence(2000, due_s=2.82 + 2 * wait_s + more_s)
        assert asked(Pacer(None, BUDGET), [seq], 0.0, [prompt], work) == size


def test_prompts_of_which_nobody_said_when_wait_for_a_step_no_longer_than_it_takes() -> None:
    """0.33 s, of which it needs 0.18 s to gain enough; here it gains nothing, as others do."""
    pacer, seq, prompt = Pacer(None, BUDGET), make_sequence(9, tpot_s=0.1), make_sequence(WAITS)
    work, sizes = StepWork(2, 0, WAITS), []
    for now_s in (5.0, 5.05, 5.1, 5.14):  # it is held for 0.15 s
        tight = make_sequence(9, tpot_s=0.1)  # a newcomer
        sizes.append(asked(pacer, [tight], now_s, [prompt], work))
        asked(pacer, [tight], now_s, [prompt], work)  # asking alone counts nothing
        pacer.count_step()
    sizes.append(asked(pacer, [make_sequence(9, tpot_s=0.1)], 5.16, [prompt], work))
    pacer.count_step()
    sizes.append(asked(pacer, [seq], 5.17, [prompt], work))
    assert sizes == [0, 0, 0, 0, None, 0]


def test_what_is_computed_before_a_prompt_is_waited_for_too() -> None:
    seq, last = make_sequence(9, tpot_s=0.1), make_sequence(WAITS + 1, due_s=1.1)
    first = make_sequence(WAITS)
    work = StepWork(1, 0, 2 * WAITS)
    assert asked(Pacer(None, BUDGET), [seq], 0.0, [last, first], work) == 0
    assert asked(Pacer(None, BUDGET), [seq], 0.0, [first, last], work) is None
    first.num_computed_tokens = WAITS - 1
    assert asked(Pacer(None, BUDGET), [seq], 0.0, [first, last], work) == 0, "it decodes"


def asked(
    pacer: Pacer,
    decoding: Many[Sequence],
    now_s: float,
    prompts: Many[Sequence] | None = None,
    work: StepWork = PROMPTS,
) -> int | None:
    """Where prompts have all the time, unless they are given."""
    if prompts is None:
        prompts = [make_sequence(5000, due_s=1e6)]
    for seq in decoding:
        seq.num_computed_tokens = seq.num_tokens - 1
    return pacer.max_prompt_tokens(decoding, [*decoding, *prompts], work, MODEL, now_s)


def test_nothing_is_held_back_where_nobody_waits_or_nothing_is_known() -> None:
    pacer, seq = Pacer(TPOT_S, BUDGET), make_sequence(9)
    assert asked(pacer, [], 0.0) is None
    assert asked(pacer, [seq], 0.0, work=StepWork(2, 20)) is None
    cold = MODEL._replace(prefill=MODEL.prefill._replace(num_steps=1))
    assert pacer.max_prompt_tokens([seq], [seq], PROMPTS, cold, 0.0) is None


def test_prompts_are_not_held_back_for_ever() -> None:
    """Newcomers owe a token soon, one after the other."""
    pacer = Pacer(TPOT_S, BUDGET)
    sizes = []
    for number in range(70):
        decoding = [make_sequence(number + 1)]
        for _ in range(2):  # the first time nothing could run
            size = asked(pacer, decoding, float(number))
        pacer.count_step()
        sizes.append(size)
    assert sizes.count(64) == 2
    assert sizes.count(0) == 68


class Run:
    """A scheduler whose steps take what the model says, by a clock that only they move."""

    def __init__(self, pacer: Pacer | None) -> None:
        config = SchedulerConfig(max_model_len=4096, max_batched_tokens=BUDGET, max_num_seqs=16)
        self.scheduler = Scheduler(config, BlockPool(1024, 16))
        self.pacer = pacer
        self.now_s = 0.0
        self.token_times: dict[Sequence, list[float]] = {}

    def start(self, seq: Sequence) -> Sequence:
        self.scheduler.reserve(seq)
        self.scheduler.start(seq, [], compute_missing=True)
        self.token_times[seq] = []
        return seq

    def step(self) -> None:
        scheduler, limit = self.scheduler, None
        if self.pacer is not None:
            limit = self.pacer.max_prompt_tokens(
                scheduler.decoding, scheduler.runnable, scheduler.work, MODEL, self.now_s
            )
        plan = scheduler.schedule(limit)
        assert plan is not None
        if self.pacer is not None:
            self.pacer.count_step()
        work = work_of(plan)
        self.now_s += MODEL.cost_of(work).expected_s(work)
        tokens = tuple(SampledToken(7, math.nan) if chunk.sample else None for chunk in plan.chunks)
        for update in scheduler.update(plan, StepOutput(tokens=tokens, duration_s=0.0)):
            if update.token is not None:
                self.token_times[update.sequence].append(self.now_s)

    def latest_s(self, seqs: Many[Sequence]) -> float:
        """By how much the latest token of these came after it was due; less than 0: none did."""
        return max(
            self.late_s(seq, number) for seq in seqs for number in range(len(self.token_times[seq]))
        )

    def late_s(self, seq: Sequence, number: int) -> float:
        """By how much that token of it came after it was due."""
        times = self.token_times[seq]
        return times[number] - (times[0] + number * TPOT_S)


@pytest.mark.parametrize("paced", ["nobody", "all", "who runs"])
@pytest.mark.parametrize("expected", [0, 300])
def test_long_prompts_beside_decodes_break_no_promise(paced: str, expected: int) -> None:
    """Three prompts of 3,000 tokens come while four sequences run; unpaced they stop these.

    Who lends of what it will gain is late in between, and not in the end.
    """
    own_s = TPOT_S if paced == "who runs" else 0.0
    run = Run(None if paced == "nobody" else Pacer(TPOT_S if paced == "all" else None, BUDGET))
    running = [
        run.start(make_sequence(20 + number, 300, tpot_s=own_s, expected=expected))
        for number in range(4)
    ]
    for _ in range(6):
        run.step()
    prompts = [run.start(make_sequence(3000 + number, 4)) for number in range(3)]
    while not all(len(run.token_times[seq]) == 4 for seq in prompts):
        run.step()
    between_s = run.latest_s(running)
    lends = paced == "who runs" and expected > 0
    assert (between_s > 1.0) if lends or paced == "nobody" else (between_s <= 1e-9)
    while not all(len(run.token_times[seq]) == 300 for seq in running):
        run.step()
    last_s = max(run.late_s(seq, 299) for seq in running)
    assert last_s <= 1e-9


def test_a_token_of_a_step_in_flight_is_not_drawn_yet() -> None:
    pacer, seq = Pacer(None, BUDGET), make_sequence(9, tpot_s=0.05, expected=30)
    seq.num_unknown_tokens = 1  # its first
    pacer.note([seq], 10.0)
    assert pacer.paced(10.0)[0].num_drawn == 0
    seq.token_ids += [1]
    pacer.note([seq], 10.1)
    assert pacer.paced(10.1)[0].num_drawn == 0, "the second is in flight"

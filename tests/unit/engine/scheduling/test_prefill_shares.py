"""Prompts share a step where that serves those that wait; else one comes after the other."""

import random

import pytest

from diptych.engine.scheduling.prefill_shares import PrefillShares
from diptych.engine.scheduling.scheduler import Scheduler
from diptych.engine.scheduling.sequence import Sequence, SequenceState
from diptych.engine.scheduling.step import SampledToken, StepOutput
from diptych.step_model import NUM_KNOWN_STEPS, StepCost
from tests.unit.engine.scheduling.steps import make_scheduler, make_sequence, start_local

COSTLY = StepCost(0.036, prefill_token_s=0.002, num_steps=NUM_KNOWN_STEPS)  # tokens, on a core
CHEAP = StepCost(0.01, prefill_token_s=25e-6, num_steps=NUM_KNOWN_STEPS)  # on a GPU


def waiting(*lengths: int, max_tokens: int = 1) -> tuple[Scheduler, list[Sequence]]:
    scheduler = make_scheduler(4096, max_model_len=2000)
    seqs = [
        start_local(scheduler, make_sequence([number] * length, max_tokens=max_tokens))
        for number, length in enumerate(lengths, start=1)
    ]
    return scheduler, seqs


def step(scheduler: Scheduler, cost: StepCost | None) -> list[int]:
    """The tokens of each of its chunks."""
    plan = scheduler.schedule(prefill_cost=cost)
    assert plan is not None
    tokens = tuple(SampledToken(7, 0.0) if chunk.sample else None for chunk in plan.chunks)
    scheduler.update(plan, StepOutput(tokens=tokens, duration_s=0.01))
    return [len(chunk.token_ids) for chunk in plan.chunks]


def test_where_tokens_cost_much_one_is_computed_after_the_other() -> None:
    scheduler, _ = waiting(100, 120, 90)
    assert [step(scheduler, COSTLY) for _ in range(3)] == [[100], [120], [90]]


@pytest.mark.parametrize("cost", [CHEAP, None])
def test_where_they_cost_little_or_nobody_knows_steps_are_full(cost: StepCost | None) -> None:
    scheduler, _ = waiting(100, 120, 90)
    assert step(scheduler, cost) == [100, 120, 90]


def test_of_many_short_ones_so_many_go_together_as_save_the_others_more() -> None:
    """n that end with it are each 0.04 s later for one more, which saves 40 - n others 0.036 s."""
    scheduler, _ = waiting(*[20] * 40)
    assert len(step(scheduler, COSTLY)) == 19
    assert len(step(scheduler, COSTLY)) == 10


def test_a_short_one_goes_along_before_its_turn_and_the_next_step_is_the_long_ones() -> None:
    scheduler, _ = waiting(100, 300, 16)
    assert step(scheduler, COSTLY) == [100, 16]
    assert step(scheduler, COSTLY) == [300]


def test_who_does_not_end_with_the_step_is_kept_waiting_by_nobody() -> None:
    scheduler, _ = waiting(700, 100)
    assert sum(step(scheduler, COSTLY)) == 512


@pytest.mark.parametrize(("length", "is_kept_waiting"), [(3000, False), (250, True)])
def test_a_part_of_a_long_prompt_keeps_no_other_waiting(length: int, is_kept_waiting: bool) -> None:
    shares = PrefillShares(512, block_size=16, max_step_tokens=512, cost=COSTLY, num_waiting=2)
    shares.take(make_sequence([1] * length))
    assert shares.has_room_for(make_sequence([2] * 200)) is not is_kept_waiting


def test_beside_those_that_decode_steps_are_full() -> None:
    scheduler, _ = waiting(10, max_tokens=20)
    assert step(scheduler, COSTLY) == [10]
    for number, length in enumerate((100, 120, 90), start=2):
        start_local(scheduler, make_sequence([number] * length))
    assert step(scheduler, COSTLY) == [1, 100, 120, 90]


def test_all_are_computed_whatever_they_cost() -> None:
    rng = random.Random(3)
    for _ in range(50):
        lengths = [rng.randrange(1, 900) for _ in range(rng.randrange(1, 12))]
        cost = StepCost(10 ** rng.uniform(-4, 0), prefill_token_s=10 ** rng.uniform(-6, 0))
        scheduler, seqs = waiting(*lengths)
        num_steps = 0
        while any(seq.state is not SequenceState.FINISHED for seq in seqs):
            assert step(scheduler, cost)
            num_steps += 1
        assert num_steps <= len(lengths) + sum(lengths) // 250


@pytest.mark.parametrize("block_size", [16, 64, 128, 256])
def test_a_long_prompt_gets_on_beside_short_ones_however_large_blocks_are(block_size: int) -> None:
    """What its turn gave it is less than a block, and one of those that end comes each step."""
    num_computed = 0
    for num_left in (block_size // 2, block_size, 2 * block_size):
        shares = PrefillShares(num_left, block_size=block_size, max_step_tokens=512)
        long, short = make_sequence([1] * 3000), make_sequence([2] * min(7, num_left // 2))
        shares.take(long)
        given = shares.ends[long]
        assert given > 0
        shares.take(short)
        shares.share_out_rest()
        assert shares.ends.get(long, 0) >= given
        assert sum(shares.ends.values()) <= num_left
        num_computed += shares.ends[long]
    assert num_computed


def test_long_prompts_share_what_is_left_of_a_step_and_no_more() -> None:
    shares = PrefillShares(512, block_size=16, max_step_tokens=512)
    longs = [make_sequence([number] * 3000) for number in range(3)]
    for seq in longs:
        shares.take(seq)
    shares.share_out_rest()
    assert sum(shares.ends.values()) == 512


def test_room_is_told_of_to_those_who_get_a_token_and_to_no_others() -> None:
    """Who is let in without one holds a place that others could have."""
    chance, answers = random.Random(1), {True: 0, False: 0}
    for _ in range(300):
        num_tokens, of_batches = chance.randrange(200), chance.choice([None, 0, 40])
        shares = PrefillShares(
            num_tokens,
            block_size=16,
            max_step_tokens=200,
            max_prompt_tokens=chance.choice([None, 50]),
            max_yielding_tokens=of_batches,
            cost=chance.choice([None, COSTLY]),
            num_waiting=5,
        )
        for number in range(5):
            seq = make_sequence([number] * chance.randrange(2, 300))
            seq.yields = chance.random() < 0.3
            has_room = shares.has_room_for(seq)
            shares.take(seq)
            assert (seq in shares.ends) is has_room
            answers[has_room] += 1
        given = sum(end for seq, end in shares.ends.items() if seq.yields)
        assert sum(shares.ends.values()) <= num_tokens
        assert given <= (num_tokens if of_batches is None else of_batches)
    assert min(answers.values()) > 100

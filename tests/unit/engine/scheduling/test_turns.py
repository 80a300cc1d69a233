"""Whose prompts a worker computes first, where several payers' wait."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.engine.scheduling.admission import Admission
from diptych.engine.scheduling.block_pool import BlockPool
from diptych.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from diptych.engine.scheduling.sequence import Sequence, SequenceKey
from diptych.engine.scheduling.step import SampledToken, StepOutput, StepPlan
from diptych.engine.scheduling.turns import Turns
from diptych.sampling_params import SamplingParams

STEP = 64
numbers = iter(range(1, 10**9))


def prompt(
    payer: bytes,
    num_tokens: int = STEP,
    *,
    tier: int = 0,
    weight: float = 1.0,
    yields: bool = False,
) -> Sequence:
    """Of tokens that no other has, so that nothing is cached."""
    number = next(numbers)
    return Sequence(
        key=SequenceKey("router", number),
        token_ids=[number * 1000 + index for index in range(num_tokens)],
        num_prompt_tokens=num_tokens,
        sampling=SamplingParams(max_tokens=2, temperature=0.0),
        prefill_only=True,
        payer=payer,
        tier=tier,
        tier_weight=weight,
        yields=yields,
    )


class Worker:
    """Computes prompts, a step at a time."""

    def __init__(self) -> None:
        config = SchedulerConfig(max_num_seqs=64, max_batched_tokens=STEP, max_model_len=1024)
        self.scheduler = Scheduler(config, BlockPool(8192, 16))
        self.given: Counter[bytes] = Counter()
        self.ended: list[Sequence] = []

    def add(self, *seqs: Sequence) -> None:
        for seq in seqs:
            self.scheduler.add_prefill(seq)

    def step(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        for seq, chunk in zip(self.scheduler.owners(plan), plan.chunks, strict=True):
            self.given[seq.payer] += len(chunk.token_ids)
        tokens = tuple(None if c.sample is None else SampledToken(7, 1.0) for c in plan.chunks)
        for update in self.scheduler.update(plan, StepOutput(tokens=tokens, duration_s=0.0)):
            if update.token is not None:
                self.ended.append(update.sequence)
                self.scheduler.release(update.sequence)
        return plan

    def steps(self, num: int) -> None:
        for _ in range(num):
            assert self.step() is not None


def test_of_one_payer_who_comes_first_is_first() -> None:
    worker = Worker()
    seqs = [prompt(b"a", size) for size in (40, 60, 10, 64, 33)]
    worker.add(*seqs)
    while worker.step() is not None:
        pass
    assert worker.ended == seqs


def test_a_payers_first_prompt_passes_those_of_another_that_wait() -> None:
    worker = Worker()
    worker.add(*(prompt(b"flood") for _ in range(20)))
    worker.steps(3)
    light = prompt(b"light")
    worker.add(light)
    worker.step()
    assert worker.ended[-1] is light


def test_two_that_always_wait_share_alike_whatever_their_prompts_lengths() -> None:
    worker = Worker()
    worker.add(
        *(prompt(b"short", 16) for _ in range(100)), *(prompt(b"long", 160) for _ in range(10))
    )
    worker.steps(20)
    assert abs(worker.given[b"short"] - worker.given[b"long"]) <= 160


def test_who_was_idle_has_saved_nothing_up() -> None:
    worker = Worker()
    worker.add(prompt(b"back"), *(prompt(b"busy") for _ in range(40)))
    worker.steps(21)
    worker.given.clear()
    worker.add(*(prompt(b"back") for _ in range(40)))
    worker.steps(10)
    assert abs(worker.given[b"back"] - worker.given[b"busy"]) <= STEP


def test_a_tier_that_was_idle_has_saved_nothing_up() -> None:
    worker = Worker()
    worker.add(prompt(b"back", tier=3), *(prompt(b"busy", tier=1) for _ in range(40)))
    worker.steps(21)
    worker.given.clear()
    worker.add(*(prompt(b"back", tier=3) for _ in range(40)))
    worker.steps(10)
    assert abs(worker.given[b"back"] - worker.given[b"busy"]) <= STEP


def test_who_waited_alone_has_saved_nothing_up() -> None:
    """Who comes then begins where it stands."""
    worker = Worker()
    worker.add(*(prompt(b"early") for _ in range(20)))
    worker.steps(20)
    worker.add(prompt(b"late"))
    worker.steps(1)
    worker.given.clear()
    worker.add(*(prompt(payer) for payer in (b"early", b"late") for _ in range(20)))
    worker.steps(10)
    assert abs(worker.given[b"early"] - worker.given[b"late"]) <= STEP


def test_payers_share_one_step() -> None:
    worker = Worker()
    worker.add(*(prompt(payer, 16) for payer in (b"a", b"b") for _ in range(4)))
    worker.step()
    assert worker.given == {b"a": 32, b"b": 32}


def test_tiers_share_one_step() -> None:
    worker = Worker()
    worker.add(*(prompt(b"urgent", 16, tier=1, weight=3.0) for _ in range(4)))
    worker.add(*(prompt(b"other", 16, tier=3) for _ in range(4)))
    worker.step()
    assert worker.given == {b"urgent": 48, b"other": 16}


def test_who_gave_way_is_owed_two_steps_and_no_more() -> None:
    """Nor is anybody who comes while it waits."""
    worker = Worker()
    batch = [prompt(b"batch", yields=True) for _ in range(40)]
    worker.add(*batch, *(prompt(b"flood") for _ in range(80)))
    worker.steps(40)
    assert worker.given == {b"flood": 40 * STEP}
    for seq in batch:
        seq.has_aged = True
    worker.given.clear()
    worker.add(*(prompt(b"new") for _ in range(40)))
    worker.steps(30)
    assert worker.given[b"flood"] >= 8 * STEP
    assert abs(worker.given[b"new"] - worker.given[b"batch"]) <= STEP


def test_a_tier_that_gave_way_is_owed_two_steps_of_others_and_no_more() -> None:
    worker = Worker()
    batch = [prompt(b"batch", tier=3, weight=8.0, yields=True) for _ in range(40)]
    worker.add(*batch, *(prompt(b"flood", tier=1, weight=8.0) for _ in range(80)))
    worker.steps(40)
    for seq in batch:
        seq.has_aged = True
    worker.given.clear()
    worker.steps(30)
    assert worker.given[b"flood"] >= 13 * STEP


def test_who_lacked_blocks_is_owed_two_steps_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    held = prompt(b"held")
    held.prefill_only = False
    worker.scheduler.reserve(held)
    worker.scheduler.start(held, [], compute_missing=True)
    worker.scheduler._preempt(held)
    worker.add(*(prompt(b"flood") for _ in range(60)))
    with monkeypatch.context() as patch:
        patch.setattr(Admission, "admit_again", lambda self, seq: False)
        worker.steps(40)
    assert worker.given == {b"flood": 40 * STEP}
    worker.given.clear()
    worker.add(*(prompt(b"held") for _ in range(40)))
    worker.steps(20)
    assert abs(worker.given[b"held"] - worker.given[b"flood"]) <= 3 * STEP


def test_who_cancels_was_given_nothing_for_it() -> None:
    worker = Worker()
    worker.add(*(prompt(b"flood") for _ in range(20)))
    worker.step()
    gone = [prompt(b"light", 512) for _ in range(10)]
    worker.add(*gone)
    for seq in gone:
        worker.scheduler.release(seq)
    worker.step()
    light = prompt(b"light")
    worker.add(light)
    worker.step()
    assert worker.ended[-1] is light


@pytest.mark.parametrize("num_urgent", [1, 10])
def test_tiers_share_by_weight_however_many_payers_they_have(num_urgent: int) -> None:
    worker = Worker()
    for number in range(num_urgent):
        payer = b"urgent%d" % number
        worker.add(*(prompt(payer, tier=1, weight=8.0) for _ in range(100 // num_urgent)))
    worker.add(*(prompt(b"other", tier=3) for _ in range(40)))
    worker.steps(90)
    assert worker.given[b"other"] == pytest.approx(90 * STEP / 9, abs=2 * STEP)


def test_who_gives_way_is_last_whatever_it_was_given() -> None:
    worker = Worker()
    batch = prompt(b"batch", tier=3, yields=True)
    worker.add(batch, *(prompt(b"a", tier=1) for _ in range(5)))
    worker.steps(5)
    assert batch not in worker.ended
    worker.step()
    assert worker.ended[-1] is batch


def test_counters_of_payers_that_are_gone_are_forgotten() -> None:
    worker = Worker()
    for number in range(1500):
        worker.add(prompt(b"%d" % number, 16), prompt(b"%d" % (number + 1), 16))
        worker.steps(1)
    (given,) = worker.scheduler._turns._payers.values()
    assert len(given.tokens) < 1100


def test_who_was_given_much_is_not_forgotten_for_others_that_come_and_go() -> None:
    """Else many names of one client would wipe out what another of them was given."""
    turns = Turns(STEP)
    crowd = [prompt(b"crowd %d" % number, 16) for number in range(8)]
    heavy = prompt(b"heavy")
    assert len(list(turns.in_turn([heavy, *crowd]))) == 9
    turns.give(heavy, 100 * STEP)
    for number in range(1100):
        passing = prompt(b"%d" % number, 16)
        assert len(list(turns.in_turn([*crowd, passing]))) == 9
        turns.give(passing, 1)
    (given,) = turns._payers.values()
    assert len(given.tokens) < 1100, "some were forgotten"
    late, again = prompt(b"late"), prompt(b"heavy")
    assert list(turns.in_turn([late, again])) == [late, again]


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**32), waits=st.booleans())
def test_payers_come_and_go_and_few_are_known(seed: int, waits: bool) -> None:
    """Five thousand, also beside one that is never served."""
    rng, turns = Random(seed), Turns(STEP)
    held = [prompt(b"held", tier=tier, yields=True) for tier in range(2) if waits]
    present: list[Sequence] = []
    for number in range(5000):
        present.append(prompt(b"%d" % number, 16, tier=rng.randrange(2)))
        line = list(turns.in_turn([*present, *held]))
        for seq in line[: rng.randint(0, 2)]:
            turns.give(seq, rng.randint(1, 16))
        while len(present) > 8:
            present.pop(rng.randrange(len(present)))
        known = [len(each.tokens) for each in turns._payers.values()]
        assert max(known) <= 1024 + len(present) + 2


@pytest.mark.parametrize("num_steps", [1, 10])
def test_however_many_come_pass_nobody_for_long(num_steps: int) -> None:
    """A payer with each step, all of them lifted to what those have that wait."""
    worker, first = Worker(), prompt(b"first", num_steps * STEP)
    worker.add(first, prompt(b"second"))
    for number in range(10 * num_steps):  # as many wait as come: its share gets ever less
        worker.step()
        worker.add(prompt(b"%d" % number))
    assert first in worker.ended


def test_whoever_comes_passes_a_flood() -> None:
    worker = Worker()
    worker.add(*(prompt(b"flood") for _ in range(20)))
    for _ in range(5):
        worker.step()
        worker.add(light := prompt(b"light"))
        worker.step()
        assert worker.ended[-1] is light

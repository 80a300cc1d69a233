"""Whose prompts a worker computes first, where several payers' wait."""

from collections import Counter

import pytest

from diptych.engine.scheduling.block_pool import BlockPool
from diptych.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from diptych.engine.scheduling.sequence import Sequence, SequenceKey
from diptych.engine.scheduling.step import SampledToken, StepOutput, StepPlan
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
    assert abs(worker.given[b"early"] - worker.given[b"late"]) <= 2 * STEP


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

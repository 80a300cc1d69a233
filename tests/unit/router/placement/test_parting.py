"""Which workers of both roles had best compute prompts, by what requests are like."""

from dataclasses import replace

import pytest

from diptych.step_model import StepCost
from router.placement.parting import Mix, Parting, Parts
from router.placement.query import Objectives, Query
from router.placement.views import DecodeView, PrefillView, Snapshot, WorkerId
from tests.unit.router.placement.predicted_world import MODEL, view_d, view_p

PACE_S = 0.08


def worker(number: int) -> WorkerId:
    return WorkerId(f"w{number}:1", f"w{number}")


def both(num: int) -> Snapshot:
    workers = [worker(number) for number in range(num)]
    prefill: list[PrefillView] = [view_p(each) for each in workers]
    decode: list[DecodeView] = [view_d(each, 0, MODEL) for each in workers]
    return Snapshot(tuple(prefill), tuple(decode))


def seen(num_prompt: int, num_output: int, num: int = 400, num_workers: int = 8) -> Parting:
    parting = Parting()
    tell(parting, num_prompt, num_output, num, num_workers)
    return parting


def tell(
    parting: Parting,
    num_prompt: int,
    num_output: int,
    num: int,
    num_workers: int,
    pace_s: float = PACE_S,
) -> None:
    query = Query(
        num_tokens=num_prompt,
        num_max_tokens=num_prompt + num_output,
        num_output_tokens=num_output,
        objectives=Objectives(2.0, pace_s),
    )
    for _ in range(num):
        parting.learn(query, num_prompt, num_workers)


def num_computing(parting: Parting, snapshot: Snapshot) -> int:
    parts = parting.parts(snapshot)
    views = {view.worker for view in snapshot.decode}
    assert parts.computing | parts.decoding <= views
    assert not parts.computing & parts.decoding
    return len(parts.computing)


def test_the_longer_the_prompts_the_more_workers_compute_them() -> None:
    mixes = [(50, 400), (400, 100), (800, 20)]
    nums = [num_computing(seen(*mix), both(8)) for mix in mixes]
    assert nums == sorted(set(nums))
    assert nums[0] >= 1
    assert nums[-1] <= 7, "somebody decodes"


@pytest.mark.parametrize("num", [3, 4, 6, 8, 16])
@pytest.mark.parametrize(("prompt", "output"), [(400, 60), (800, 20), (300, 25), (50, 400)])
def test_the_split_that_saturates_last_is_chosen(prompt: int, output: int, num: int) -> None:
    """By the step model: so many prompts, and so many answers, a second.

    Of the answers that keep pace there those decode whose prompts are computed, which takes as
    long as two prompts do.
    """
    computing = num_computing(seen(prompt, output, num_workers=num), both(num))
    view = both(1).decode[0]
    assert view.engine is not None
    cost, most = view.engine.model.prefill, view.engine.max_batched_tokens
    prompt_s = prompt / most * cost.fixed_s + prompt * cost.prefill_token_s
    prompt_s += prompt**2 / 2 * cost.attention_pair_s
    pace = view.engine.model.decode
    row_s = pace.row_s + (prompt + output / 2) * pace.context_token_s
    num_rows = (PACE_S / pace.upper_ratio - pace.fixed_s) / row_s
    if view.max_num_seqs is not None:
        num_rows = min(num_rows, view.max_num_seqs)
    decoding_ratio = output * PACE_S / (output * PACE_S + 2 * prompt_s)
    answer_s = output * (pace.fixed_s / num_rows + row_s) / decoding_ratio
    rates = [min(k / prompt_s, (num - k) / answer_s) for k in range(1, num)]
    assert rates[computing - 1] == pytest.approx(max(rates))


@pytest.mark.parametrize(
    ("prompt", "output", "are_apart"),
    [(800, 5, False), (800, 30, True), (2000, 20, False), (2000, 100, True)],
)
def test_several_part_unless_answers_take_hardly_longer_than_prompts(
    prompt: int, output: int, are_apart: bool
) -> None:
    """Who decodes would have its places full of sequences that wait for their prompts."""
    for num in (3, 8):
        snapshot = both(num)
        whole = seen(prompt, output).together(snapshot)
        assert (whole is None) is are_apart
        assert whole is None or whole is snapshot.each_alone
        assert Parting().together(snapshot) is None, "of what nothing is known"


def test_another_mix_changes_the_parts_within_as_many_requests_as_are_remembered() -> None:
    parting = seen(800, 20)
    before = num_computing(parting, both(8))
    tell(parting, 50, 400, 128, 8)
    assert num_computing(parting, both(8)) < before


def test_an_answer_counts_as_expected_until_it_is_whole_and_then_as_it_was() -> None:
    """Whichever is whole first, however many came meanwhile, and at first as later."""
    for num in (10, 300):
        guessed, known = Parting(), Parting()
        counted = []
        for number in range(num):
            num_drawn = 7 * (number % 13) + 1
            query = Query(300, 2000, num_output_tokens=20, objectives=Objectives(2.0, PACE_S))
            counted.append((guessed.learn(query, 300, 8), num_drawn))
            known.learn(query._replace(num_output_tokens=num_drawn), 300, 8)
            if number % 3 == 0:
                guessed.answered(*counted.pop(len(counted) // 2))
        assert guessed._mix != known._mix
        while counted:
            guessed.answered(*counted.pop())
        assert guessed._mix == pytest.approx(known._mix)


def test_a_mix_that_hardly_changes_changes_nobody() -> None:
    parting, snapshot = seen(200, 100), both(8)
    parts = parting.parts(snapshot)
    for number in range(200):
        tell(parting, 200 + (-1) ** number * 40, 100, 1, 8)
        assert parting.parts(snapshot) == parts


def test_parts_that_saturate_much_sooner_than_others_could_do_not_stay() -> None:
    """Of eight 6.5 were best: of six and seven that are near, one leaves too little to decode."""
    parting, snapshot = Parting(), both(8)
    tell(parting, 900, 4, 400, 8, 10.0)
    assert num_computing(parting, snapshot) == 7
    tell(parting, 700, 20, 400, 8, 10.0)
    wanted = parting._wanted(snapshot, 0, 8)
    assert wanted is not None
    assert 6.3 < wanted.num < 6.8
    assert num_computing(parting, snapshot) == 6


def test_routers_part_workers_alike_and_most_keep_their_part_when_one_leaves() -> None:
    one, other = seen(300, 60).parts(both(8)), seen(300, 60).parts(both(8))
    assert one == other
    fewer = both(7)
    parts = seen(300, 60).parts(fewer)
    assert len(parts.computing - one.computing) <= 1


def test_a_worker_that_came_has_a_part_too() -> None:
    parting = seen(300, 60)
    parting.parts(both(7))
    parts = parting.parts(both(8))
    assert worker(7) in parts.computing | parts.decoding


def test_workers_of_one_role_count_and_have_no_part() -> None:
    """Enough of them compute prompts: those of both roles decode."""
    soft, alone = both(2), tuple(view_p(worker(number)) for number in range(10, 20))
    parts = seen(100, 100).parts(replace(soft, prefill=(*soft.prefill, *alone)))
    assert parts == Parts(frozenset(), frozenset({worker(0), worker(1)}))


@pytest.mark.parametrize("num", [0, 3])
def test_little_seen_says_nothing(num: int) -> None:
    assert seen(300, 60, num).parts(both(8)) == Parts()


def test_nothing_is_said_where_nobody_wants_a_pace_or_no_worker_has_both_roles() -> None:
    parting = Parting()
    for _ in range(100):
        parting.learn(Query(num_tokens=300, num_max_tokens=400), 300, 8)
    assert parting.parts(both(8)) == Parts()
    apart = Snapshot((view_p(worker(0)),), (view_d(worker(1), 0, MODEL),))
    assert seen(300, 60).parts(apart) == Parts()


@pytest.mark.parametrize("pace_s", [0.011, 0.014, 0.03, 0.5, 5.0])
def test_so_many_answers_keep_a_pace_where_later_rows_cost_more(pace_s: float) -> None:
    mix = Mix(num_tokens=300, num_output_tokens=100)
    cost = StepCost(0.009, 0.0005, 1e-6, 0.0, 0.0, 1.1, 100, (0.0015, 0.0, 0.001, 0.002))
    num_rows = mix.num_rows(cost, 10_000, pace_s)
    step_s = cost.fixed_s + cost.rows_s(num_rows) + num_rows * 350 * 1e-6
    assert num_rows > 1.0
    assert step_s * 1.1 == pytest.approx(pace_s)
    assert mix.answer_s(cost, 10_000, pace_s) == pytest.approx(100 * step_s / num_rows)
    assert mix.num_rows(cost, 1, pace_s) == 1.0
    assert mix.answer_s(cost, 1, pace_s) == pytest.approx(100 * (0.0095 + 350e-6))


def test_prompts_that_are_cached_whole_part_workers_by_their_last_tokens() -> None:
    """As of the first requests of a router beside workers that served before."""
    parting, snapshot = Parting(), both(8)
    query = Query(num_tokens=64, num_max_tokens=164, objectives=Objectives(2.0, PACE_S))
    for _ in range(99):
        parting.learn(query, 0, 8)
        parting.parts(snapshot)
    assert num_computing(parting, snapshot) == 1


def test_where_prompts_take_no_time_nobody_has_a_part() -> None:
    free = MODEL._replace(prefill=StepCost(row_s=1e-3, num_steps=99))
    snapshot = both(8)
    views = tuple(view_d(view.worker, 0, free) for view in snapshot.decode)
    parting = seen(500, 100)
    assert parting.parts(snapshot).computing
    assert parting.parts(replace(snapshot, decode=views)) == Parts()


@pytest.mark.parametrize("odd_s", [86_400.0, 1e-9])
@pytest.mark.parametrize("mix", [(400, 60), (800, 80), (50, 400)])
def test_one_odd_pace_weighs_no_more_than_any_other(mix: tuple[int, int], odd_s: float) -> None:
    """As of one that has a day for each token, or no time at all."""
    parting, two, eight = Parting(), both(2), both(8)
    tell(parting, *mix, 100, 2)
    were_together = parting.together(two) is not None
    before = num_computing(parting, eight)
    tell(parting, *mix, 1, 2, odd_s)
    for _ in range(40):
        assert (parting.together(two) is not None) is were_together
        assert num_computing(parting, eight) == before
        tell(parting, *mix, 1, 2)


@pytest.mark.parametrize("odd_s", [86_400.0, 1e-9])
def test_the_first_pace_is_forgotten_like_any_other(odd_s: float) -> None:
    parting = Parting()
    tell(parting, 400, 60, 1, 8, odd_s)
    tell(parting, 400, 60, 63, 8)
    assert num_computing(parting, both(8)) == num_computing(seen(400, 60), both(8))


def test_the_pace_is_the_one_that_all_of_late_want() -> None:
    parting = Parting()
    tell(parting, 400, 60, 100, 8)
    assert parting._paces.mean_s == pytest.approx(PACE_S)
    tell(parting, 400, 60, 500, 8, 2 * PACE_S)
    assert parting._paces.mean_s == pytest.approx(2 * PACE_S)


@pytest.mark.parametrize(
    ("other_s", "least", "most"),
    [(2 * PACE_S, 1.1, 1.4), (86_400.0, 1.2, 1.8), (1e-9, 0.3, 0.8), (0.0, 0.3, 0.8)],
)
def test_where_some_want_another_pace_both_count(other_s: float, least: float, most: float) -> None:
    """Also where it is no pace to speak of, or none that can be had."""
    parting = Parting()
    for number in range(200):
        tell(parting, 400, 60, 1, 8, PACE_S if number % 3 else other_s)
    mean_s = parting._paces.mean_s
    assert mean_s is not None
    assert least <= mean_s / PACE_S <= most


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_of_steps_that_take_next_to_nothing_there_is_no_share(phase: str) -> None:
    """What a worker says so measured nothing; it is no reason to fail."""
    none = StepCost(1e-20, num_steps=100)
    model = MODEL._replace(decode=none) if phase == "decode" else MODEL._replace(prefill=none)
    odd = replace(both(3), decode=tuple(view_d(worker(number), 0, model) for number in range(3)))
    assert num_computing(seen(600, 100, num_workers=3), odd) == 0

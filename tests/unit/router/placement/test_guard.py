"""When a policy that foretells is left for a fixed regime, and when it comes back."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import count, pairwise

import pytest

from diptych.step_model import NUM_KNOWN_STEPS, StepCost, StepModel
from router.placement import guard as guards
from router.placement.cache_index import CacheIndex
from router.placement.guard import LOOK_S, STAY_S, SURE_S, TRIAL_S, Guard, Rates, Regime, kept_ratio
from router.placement.guarded import Guarded
from router.placement.least_loaded import LeastLoaded
from router.placement.placement import DecodeOnly, Paired
from router.placement.query import EndedRequest, Objectives, Query
from router.placement.views import Snapshot
from tests.unit.router.placement.predicted_world import D1, D2, MODEL, P1, P2, view_d, view_p

GOALS = Objectives(1.0, 0.05)
RATES = Rates(num_prefill=2, num_decode=2, tokens_per_s=1000.0, step_s=0.04)


def seen(at_s: float, *, is_kept: bool, num_tokens: int = 200) -> EndedRequest:
    return EndedRequest(at_s, at_s + 1.0, num_tokens, GOALS, 0.5 if is_kept else 2.0, 0.04)


class World:
    """A guard, four requests a second, and what comes of each by the regime of its moment."""

    def __init__(self, num_tokens: int = 200) -> None:
        self.guard = Guard()
        self.now_s = 1000.0
        self.turns: list[tuple[float, Regime]] = []
        self.rates: Callable[[], Rates] = lambda: RATES
        self._num_tokens = num_tokens

    def run(self, for_s: float, is_kept: Callable[[Regime], bool]) -> None:
        until_s = self.now_s + for_s
        while self.now_s < until_s:
            self.now_s += 0.25
            kept = is_kept(self.guard.regime)
            self.guard.ended(seen(self.now_s, is_kept=kept, num_tokens=self._num_tokens))
            if self.guard.is_due and self.guard.look(self.rates()):
                self.turns.append((self.now_s, self.guard.regime))


def test_a_replay_knows_queues_and_what_prompts_take_of_tokens_beside_them() -> None:
    slow = [seen(float(at), is_kept=True, num_tokens=900) for at in range(20)]
    assert kept_ratio(Regime.APART, slow, RATES) == 1.0
    assert kept_ratio(Regime.TOGETHER, slow, RATES) == 0.0, "the time between tokens doubles"
    flood = [seen(at / 4, is_kept=True, num_tokens=900) for at in range(40)]
    assert kept_ratio(Regime.APART, flood, RATES) < 0.2
    light = [seen(float(at), is_kept=True, num_tokens=50) for at in range(20)]
    assert kept_ratio(Regime.TOGETHER, light, RATES) == 1.0


def test_workers_of_both_roles_are_counted_once() -> None:
    """Prompts that are computed there take of the time of those that decode."""
    told = snapshot(1.0)
    both = replace(view_p(D1), tokens_per_s=1000.0)
    rates = Rates.of(replace(told, prefill=(*told.prefill, both)))
    assert rates is not None
    assert (rates.num_prefill, rates.num_decode) == (2, 2)
    soft = Rates.of(Snapshot((both,), told.decode))
    assert soft is not None
    assert soft.num_prefill == 0
    assert kept_ratio(Regime.APART, [seen(0.0, is_kept=True)], soft) == 0.0


def test_where_each_worker_has_both_roles_half_of_them_could_be_apart() -> None:
    told = snapshot(1.0)
    both = tuple(replace(view_p(worker), tokens_per_s=1000.0) for worker in (D1, D2))
    decode = tuple(replace(view, proven=frozenset({"d1", "d2"})) for view in told.decode)
    rates = Rates.of(Snapshot(both, decode))
    assert rates is not None
    assert (rates.num_prefill, rates.num_both, rates.num_apart) == (0, 2, 1)
    policy, query = made(), Query(num_tokens=500, num_max_tokens=540)
    policy.guard.regime = Regime.APART
    assert policy.place(query, Snapshot(both, decode)) == Paired(D1, D2)


def test_where_hardly_anything_is_as_foretold_each_regime_is_tried_in_turn() -> None:
    """What workers measure is what was made of them: by a replay nothing would be better."""
    world = World(num_tokens=5000)
    world.run(400.0, lambda regime: regime is Regime.TOGETHER)
    tried = [regime for _, regime in world.turns]
    assert tried[:3] == [Regime.TOGETHER, Regime.FREE, Regime.TOGETHER]
    world = World(num_tokens=5000)
    world.run(400.0, lambda regime: regime is Regime.APART)
    tried = [regime for _, regime in world.turns]
    assert tried[:3] == [Regime.TOGETHER, Regime.FREE, Regime.APART]


def test_where_half_is_kept_nothing_is_tried_that_no_replay_finds_better() -> None:
    world, each = World(num_tokens=5000), count()
    world.run(400.0, lambda regime: next(each) % 2 == 0)
    assert world.turns == []


def test_what_goes_well_is_left_alone() -> None:
    world = World()
    world.run(600.0, lambda regime: True)
    assert world.turns == []


def test_it_falls_back_when_another_regime_would_have_kept_more_and_comes_back() -> None:
    world = World()
    began_s = world.now_s
    world.run(60.0, lambda regime: regime is not Regime.FREE)
    ((fell_s, regime),) = world.turns
    assert regime is Regime.APART
    assert fell_s - began_s <= SURE_S + 3 * LOOK_S
    world.run(STAY_S + LOOK_S, lambda regime: True)  # it would be as good again
    back_s, regime = world.turns[1]
    assert regime is Regime.FREE
    assert back_s - fell_s <= STAY_S + LOOK_S
    world.run(300.0, lambda regime: True)
    assert len(world.turns) == 2


def test_steps_that_are_slow_at_one_moment_are_no_reason_to_wait() -> None:
    """At each third look so many sequences share a step that a replay with it keeps nothing."""
    world, turn, look = World(), count(), count()
    world.rates = lambda: RATES._replace(step_s=0.06 if next(look) % 3 == 2 else 0.04)
    began_s = world.now_s
    world.run(60.0, lambda regime: regime is not Regime.FREE or next(turn) % 5 < 3)
    assert [regime for _, regime in world.turns] == [Regime.APART]
    assert world.turns[0][0] - began_s <= SURE_S + 3 * LOOK_S


def test_while_it_stays_bad_it_is_tried_ever_more_seldom() -> None:
    world = World()
    world.run(1800.0, lambda regime: regime is not Regime.FREE)
    tried_s = sum(
        after - at for (at, regime), (after, _) in pairwise(world.turns) if regime is Regime.FREE
    )
    assert world.guard.regime is Regime.APART
    assert 0 < tried_s < 0.1 * 1800.0
    assert tried_s <= len(world.turns) / 2 * (TRIAL_S + LOOK_S)


def test_a_replay_that_promised_too_much_is_not_believed_again_soon() -> None:
    """Everything is as bad in each regime: some of it is lost to trials, less and less."""
    world = World()
    world.run(1800.0, lambda regime: False)
    fixed = [at for at, regime in world.turns if regime is not Regime.FREE]
    assert 2 <= len(fixed) <= 6
    gaps = [after - at for at, after in pairwise(fixed)]
    assert gaps == sorted(gaps)


def test_a_fixed_regime_that_is_clearly_worse_ends_before_its_trial_is_over() -> None:
    world, turn = World(), count()
    world.run(60.0, lambda regime: regime is Regime.FREE and next(turn) % 10 < 8)
    (fell_s, regime), (back_s, back) = world.turns
    assert (regime, back) == (Regime.APART, Regime.FREE)
    assert back_s - fell_s <= 2 * LOOK_S


def test_a_fixed_regime_that_is_hardly_worse_has_its_whole_trial() -> None:
    world, turn = World(), count()
    world.run(60.0, lambda regime: next(turn) % 10 < 8)
    (fell_s, _), (back_s, back) = world.turns
    assert back is Regime.FREE
    assert TRIAL_S <= back_s - fell_s <= TRIAL_S + LOOK_S


def test_of_few_requests_nothing_is_said() -> None:
    world = World()
    world.run(3.0, lambda regime: False)
    world.now_s += 100.0
    world.run(0.5, lambda regime: False)
    assert world.turns == []


def made() -> Guarded:
    plain = LeastLoaded(CacheIndex(9), local_below_tokens=0, allow_local=True, allow_recompute=True)
    return Guarded(plain, lambda: 0.5)


def snapshot(factor: float) -> Snapshot:
    """Workers that say that their steps take so many times what they do take."""
    model = StepModel(replace_cost(MODEL.decode, factor), replace_cost(MODEL.prefill, factor))
    prefills = tuple(replace(view_p(each, model=model), tokens_per_s=2000.0) for each in (P1, P2))
    decodes = (view_d(each, 1, model, step_s=0.04) for each in (D1, D2))
    return Snapshot(prefills, tuple(decodes))


def replace_cost(cost: StepCost, factor: float) -> StepCost:
    return cost._replace(
        fixed_s=cost.fixed_s * factor,
        row_s=cost.row_s * factor,
        context_token_s=cost.context_token_s * factor,
        prefill_token_s=cost.prefill_token_s * factor,
        num_steps=NUM_KNOWN_STEPS,
    )


def test_a_step_model_that_is_wrong_by_a_factor_refuses_for_a_while_only() -> None:
    """Six times too slow, they say: nothing would be in time, and nearly all is told so."""
    policy, now_s = made(), 0.0
    goals = Objectives(2.0, 0.1)
    query = Query(num_tokens=500, num_max_tokens=540, objectives=goals, may_refuse=True)
    refused: dict[int, int] = {}
    for number in range(1, 800):
        now_s = 10.0 + number / 4
        told = snapshot(6.0 if now_s < 85.0 else 1.0)
        found = policy.place(query, told)
        if found is None:
            assert policy.foresee(query, told, 0.0) is not None
            refused[int(now_s) // 10] = refused.get(int(now_s) // 10, 0) + 1
        ttft_s = None if found is None else 0.6
        policy.ended_as(EndedRequest(now_s, now_s + 1.0, 500, goals, ttft_s, 0.045))
    assert refused.keys() <= {1, 2, 3}, "none, half a minute after it began"
    assert sum(refused.values()) > 50
    assert policy.guard.regime is Regime.FREE, "it says what is true since"


@pytest.mark.parametrize(
    ("regime", "kind"), [(Regime.APART, Paired), (Regime.TOGETHER, DecodeOnly)]
)
def test_a_fixed_regime_places_by_load(
    regime: Regime, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = made()
    policy.guard.regime = regime
    assert isinstance(policy.place(Query(num_tokens=500, num_max_tokens=540), snapshot(1.0)), kind)
    alone = Query(num_tokens=500, num_max_tokens=540, needs_prefill=True)
    assert isinstance(policy.place(alone, snapshot(1.0)), Paired)


def test_it_looks_seldom_and_at_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []

    def replayed(regime: Regime, requests: list[EndedRequest], rates: Rates) -> float:
        counted.append(len(requests))
        return kept_ratio(regime, requests, rates)

    monkeypatch.setattr(guards, "kept_ratio", replayed)
    policy, query = made(), Query(num_tokens=500, num_max_tokens=540)
    told = snapshot(1.0)
    for number in range(2000):
        policy.place(query, told)
        policy.ended_as(EndedRequest(number / 100, number / 100 + 1.0, 500, GOALS, 2.0, 0.04))
    assert len(counted) <= 2 * (21 / LOOK_S + 1), "in 21 s"
    assert max(counted) <= 256


def test_in_a_fixed_regime_nobody_is_held_for_what_is_foretold() -> None:
    policy, told = made(), snapshot(1.0)
    tight = Objectives(None, 0.0001)
    asked = Query(num_tokens=500, num_max_tokens=540, objectives=tight, may_refuse=True)
    crowded = replace(told, decode=(view_d(D1, 20, MODEL),))
    assert policy.place(asked._replace(objectives=Objectives(None, 0.1)), crowded) is None
    assert policy.has_declined
    policy.guard.regime = Regime.APART
    none_ready = replace(told, prefill=(), decode=())
    assert policy.place(asked, none_ready) is None
    assert not policy.has_declined


LATE = replace(
    snapshot(1.0),
    prefill=tuple(
        replace(view_p(each, model=MODEL), num_pending_tokens=5000, tokens_per_s=2000.0)
        for each in (P1, P2)
    ),
)
SLOW = replace(
    snapshot(1.0), decode=tuple(view_d(each, 9, MODEL, step_s=0.12) for each in (D1, D2))
)
BUSY = replace(
    snapshot(1.0),
    decode=tuple(view_d(each, 2, MODEL, step_s=0.04, prefill_time_ratio=0.8) for each in (D1, D2)),
)


@pytest.mark.parametrize("regime", [Regime.APART, Regime.TOGETHER])
@pytest.mark.parametrize(
    ("full", "is_late"), [(LATE, True), (SLOW, False), (BUSY, False)], ids=["late", "slow", "busy"]
)
def test_in_a_fixed_regime_no_more_is_placed_than_workers_measured_that_they_can(
    regime: Regime, full: Snapshot, is_late: bool
) -> None:
    """Else, where more comes than can be served, nobody's objectives would be kept."""
    policy, goals = made(), Objectives(2.0, 0.1, 2.0)
    policy.guard.regime = regime
    if regime is Regime.TOGETHER:
        waiting = (replace(v, num_pending_tokens=5000 * is_late) for v in full.decode)
        full = replace(full, decode=tuple(waiting))
    query = Query(num_tokens=500, num_max_tokens=540, objectives=goals, may_refuse=True)
    assert policy.place(query, full) is None
    assert policy.has_declined
    refused = policy.foresee(query, full, 0.0)
    assert (refused is not None) is is_late, "a pace may be better once others have ended"
    if refused is not None:
        assert "within 2.000 s and foretold in 2.750 s" in refused.what
        assert refused.retry_after_s == 0.75
    assert policy.place(query, snapshot(1.0)) is not None
    assert not policy.has_declined
    assert policy.foresee(query, snapshot(1.0), 0.0) is None
    assert policy.foresee(query, snapshot(1.0), 1.8) is not None
    assert policy.place(query._replace(may_refuse=False), full) is not None
    idle = replace(full, prefill=snapshot(1.0).prefill, decode=(view_d(D1, 0, MODEL, step_s=0.12),))
    assert policy.place(query, idle) is not None, "what its steps took is long ago"


def test_a_batch_that_takes_spare_room_only_does_not_look_for_the_guard() -> None:
    """It sees busy workers as if they computed no prompts."""
    policy, told = made(), snapshot(1.0)
    spare = replace(told, decode=tuple(replace(v, local_prefill=False) for v in told.decode))
    query = Query(num_tokens=500, num_max_tokens=540, objectives=Objectives(2.0, 0.1))
    batch = query._replace(is_batch=True, takes_spare_only=True)
    regimes = set[Regime]()
    for number in range(160):
        policy.place(batch, spare)
        assert policy.place(query, told) is not None
        late = EndedRequest(10.0 + number / 4, 11.0 + number / 4, 500, query.objectives, 3.0, 0.2)
        policy.ended_as(late)
        regimes.add(policy.guard.regime)
    assert regimes != {Regime.FREE}


def test_another_choice_is_put_beside_the_first_one_in_a_fixed_regime_too() -> None:
    keys = tuple(bytes([number]) * 16 for number in range(8))
    query = Query(num_tokens=136, num_max_tokens=200, block_keys=keys, beside=D1)
    told = replace(snapshot(1.0), decode=(view_d(D1, 1, MODEL, num_pending_tokens=600), view_d(D2)))
    for regime in Regime:
        policy = made()
        policy.guard.regime = regime
        policy.cache.expect(D1.incarnation, keys)
        found = policy.place(query, told)
        assert isinstance(found, DecodeOnly)
        assert found.decode == D1


def bursts(for_s: float, pause_s: float, num_tokens: int) -> list[EndedRequest]:
    """Four requests a second for a while, then nobody."""
    moments = [number / 4 for number in range(int(4 * for_s))]
    both = [*moments, *(at_s + for_s + pause_s for at_s in moments)]
    return [seen(at_s, is_kept=True, num_tokens=num_tokens) for at_s in both]


def test_a_replay_takes_bursts_for_what_they_are() -> None:
    """Prompts take as much of the time between tokens however long nobody came before."""
    rates = RATES._replace(step_s=0.03)
    assert kept_ratio(Regime.TOGETHER, bursts(15.0, 0.0, 300), rates) == 0.0
    assert kept_ratio(Regime.TOGETHER, bursts(15.0, 60.0, 300), rates) == 0.0
    assert kept_ratio(Regime.TOGETHER, bursts(15.0, 60.0, 100), rates) == 1.0


def test_what_looked_better_before_a_pause_is_not_sure_after_it() -> None:
    world = World()
    for _ in range(6):
        world.run(SURE_S - LOOK_S, lambda regime: False)
        assert world.turns == []
        world.now_s += 60.0


def test_what_several_cost_the_same_one_is_no_dark_forecast() -> None:
    """Each was told that it costs others much, which is added up; it foretold its own rightly."""
    world, turn = World(), count()

    def crowded(regime: Regime) -> bool:
        if next(turn) % 2:
            world.guard.ended(seen(world.now_s, is_kept=False)._replace(ttft_s=None))
            return True
        world.guard.foretold(0.6, 0.1)
        return True

    world.run(300.0, crowded)
    assert world.turns == []


def test_chance_alone_does_not_keep_a_fixed_regime() -> None:
    """One of ten is missed in each: a trial that had luck is no proof."""
    world, rng = World(), random.Random(3)
    began_s = at_s = world.now_s
    world.run(3600.0, lambda regime: rng.random() < 0.9)
    fixed_s, regime = 0.0, Regime.FREE
    for turned_s, following in [*world.turns, (world.now_s, Regime.FREE)]:
        fixed_s += 0.0 if regime is Regime.FREE else turned_s - at_s
        at_s, regime = turned_s, following
    assert fixed_s <= 0.1 * (world.now_s - began_s)


def test_requests_that_came_and_ended_together_are_replayed_in_any_order() -> None:
    guard = Guard()
    for number in range(40):
        late = seen(100.0 + number // 2, is_kept=False)
        guard.ended(late._replace(ttft_s=None) if number % 2 else late)
    assert not guard.look(RATES)


def test_what_was_foretold_is_no_reason_to_doubt() -> None:
    """As many are missed as the policy said: there is more work than workers, not a wrong model."""
    world = World()

    def overloaded(regime: Regime) -> bool:
        world.guard.foretold(1.0, 1.0)
        return False

    world.run(600.0, overloaded)
    assert world.turns == []


def test_what_was_foretold_after_a_pause_counts_before_anything_has_ended() -> None:
    """A burst, of which as many miss as was said, and few that come behind it."""
    world = World()
    world.run(30.0, lambda regime: True)
    world.now_s += 300.0
    burst = iter(range(40))
    for _ in range(40):
        world.guard.foretold(1.0, 1.0, world.now_s)

    def trickle(regime: Regime) -> bool:
        if next(burst, None) is not None:
            world.guard.ended(seen(world.now_s, is_kept=False))
        world.guard.foretold(0.0, 0.0, world.now_s)
        return True

    world.run(60.0, trickle)
    assert world.turns == []


@pytest.mark.parametrize(("foretold", "is_kept"), [(0.2, False), (1.0, True)])
def test_what_comes_otherwise_than_foretold_is_doubted_where_another_regime_is_better(
    foretold: float, is_kept: bool
) -> None:
    """Too much was promised; or too little, and all but a few that were tried were refused."""
    world = World()
    turn = count()

    def misled(regime: Regime) -> bool:
        if regime is not Regime.FREE:
            return True
        if next(turn) % 4:
            world.guard.ended(seen(world.now_s, is_kept=False)._replace(ttft_s=None))
            return is_kept
        world.guard.foretold(foretold, foretold)
        return is_kept

    world.run(60.0, misled)
    assert bool(world.turns)
    assert world.turns[0][1] is Regime.APART


def test_too_dark_a_forecast_that_refuses_few_is_left_alone() -> None:
    """One of ten is refused, and a replay would keep it: the others had more than was foretold."""
    world, turn = World(), count()

    def refused_seldom(regime: Regime) -> bool:
        if next(turn) % 10 == 0:
            world.guard.ended(seen(world.now_s, is_kept=False)._replace(ttft_s=None))
        world.guard.foretold(0.4, 0.4)
        return True

    world.run(600.0, refused_seldom)
    assert world.turns == []


@pytest.mark.parametrize(("factor", "is_doubted"), [(6.0, False), (1.0, True)])
def test_a_placement_tells_the_guard_what_is_foretold_of_it(
    factor: float, is_doubted: bool
) -> None:
    """Both objectives of each request are missed: as workers say, or though they say otherwise."""
    policy, told, goals = made(), snapshot(factor), Objectives(2.0, 0.1)
    query, regimes = Query(num_tokens=500, num_max_tokens=540, objectives=goals), set()
    for number in range(160):
        assert policy.place(query, told) is not None
        policy.ended_as(EndedRequest(10.0 + number / 4, 11.0 + number / 4, 500, goals, 3.0, 0.2))
        regimes.add(policy.guard.regime)
    assert (regimes != {Regime.FREE}) is is_doubted


def test_missed_objectives_are_counted_where_there_was_an_answer() -> None:
    one = EndedRequest(0.0, 1.0, 9, GOALS, 2.0, 0.04)
    assert one.num_missed == 1
    assert one._replace(tpot_s=0.06).num_missed == 2
    assert one._replace(ttft_s=0.9, tpot_s=None).num_missed == 0
    assert one._replace(objectives=Objectives()).num_missed == 0

"""What one request waits by, is charged for, and teaches of its length."""

import time
from dataclasses import replace

import pytest

from diptych.finish_reason import FinishReason
from diptych.request_class import RequestClass
from diptych.service_level import NO_LEVEL, ServiceLevel
from diptych.tenant import NOBODY
from router.client_settings import ClassesSettings
from router.client_settings import Objectives as SettingsObjectives
from router.config import RouterConfig
from router.frontend.service_classes import ServiceClasses
from router.generation.answer import Usage
from router.placement.claim import NO_CLAIM, Claim
from router.placement.engine_seconds import EngineRates
from router.placement.fair_queue import Turn
from router.placement.output_lengths import UNKNOWN_TOKENS
from router.placement.placement import Forecast, Outlook
from router.placement.query import EndedRequest, Objectives
from router.request.terms import Terms
from tests.unit.router.request.dispatch_world import (
    DECODE,
    PREFILL,
    PROMPT,
    World,
    opened,
    resolved,
)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return opened(monkeypatch)


def terms(world: World, claim: Claim, max_tokens: int = 50) -> Terms:
    return Terms(resolved(claim=claim, max_tokens=max_tokens), world.services)


def resumed(world: World, num_emitted: int, max_tokens: int = 2000) -> Terms:
    """Of one that goes on behind tokens that its client sent along."""
    request = resolved(claim=Claim(tenant="alice"), max_tokens=max_tokens)
    return Terms(replace(request, emitted_token_ids=(7,) * num_emitted), world.services)


def usage(num_output: int, num_cached: int = 0, num_resumed: int = 0) -> Usage:
    return Usage(
        num_prompt_tokens=len(PROMPT),
        num_output_tokens=num_output,
        num_cached_tokens=num_cached,
        num_resumed_tokens=num_resumed,
    )


async def test_a_request_waits_by_its_claim_and_what_it_is_expected_to_take(world: World) -> None:
    guess = EngineRates()
    alice = terms(world, Claim(RequestClass.BATCH, "alice", 7.0))
    assert alice.turn() == Turn(
        RequestClass.BATCH,
        "alice",
        guess.cost_s(len(PROMPT), 50),
        7.0,
        None,
        guess.cost_s(len(PROMPT), 0),
    )
    for _ in range(20):
        alice.finished(usage(30), FinishReason.STOP)
    assert alice.turn().cost_s == pytest.approx(guess.cost_s(len(PROMPT), 30))
    one = terms(world, Claim(RequestClass.BATCH, "alice"), max_tokens=1)
    one.finished(usage(1), FinishReason.STOP)
    assert alice.turn().cost_s == pytest.approx(guess.cost_s(len(PROMPT), 30))


async def test_an_answer_that_its_client_left_would_have_been_longer(world: World) -> None:
    """Half are of 50 tokens; half are left at 400. Who has no token yet says nothing."""
    for _ in range(50):
        whole, left, none = (terms(world, Claim(tenant="alice"), 2000) for _ in range(3))
        whole.finished(usage(50), FinishReason.STOP)
        whole.left(usage(50), was_taken=True)
        left.left(usage(400), was_taken=True)
        left.left(usage(400), was_taken=True)
        none.left(usage(0), was_taken=False)
    expected = terms(world, Claim(tenant="alice"), 2000).num_expected()
    assert 200 <= expected <= 260


async def test_a_call_that_brought_no_token_says_nothing_of_answers_lengths(world: World) -> None:
    """What went before it was told by the call that broke off, however often a client tries."""
    for _ in range(20):
        plain = terms(world, Claim(tenant="alice"), 2000)
        plain.finished(usage(50), FinishReason.STOP)
        for _ in range(5):
            again = resumed(world, 400)
            again.left(usage(400, num_resumed=400), was_taken=False)
    assert terms(world, Claim(tenant="alice"), 2000).num_expected() == 50
    more = resumed(world, 400)
    more.left(usage(401, num_resumed=400), was_taken=True)
    assert terms(world, Claim(tenant="alice"), 2000).num_expected() > 50


async def test_an_answer_that_its_client_had_whole_is_none_of_placement_and_says_no_length(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No worker was asked, and no token came late; one that fails without a token did fail."""
    told = list[EndedRequest]()
    monkeypatch.setattr(world.services.policy, "ended_as", told.append)
    for _ in range(20):
        plain, again = terms(world, Claim(tenant="alice"), 2000), resumed(world, 4)
        plain.finished(usage(50), FinishReason.STOP)
        again.finished(usage(4, num_resumed=4), FinishReason.STOP)
        again.ended(usage(4, num_resumed=4))
    assert terms(world, Claim(tenant="alice"), 2000).num_expected() == 50
    assert not told
    resumed(world, 4).ended(usage(4, num_resumed=4))
    assert [each.ttft_s for each in told] == [None]


async def test_what_is_placed_again_is_paid_for_as_it_was_charged(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, took = terms(world, Claim()), usage(30)
    one.turn()
    one.charged()
    paid_s = one.used_s(took)
    dear = EngineRates()._replace(output_token_s=9.0)
    monkeypatch.setattr(world.services.rates, "of", lambda snapshot: dear)
    one.turn()  # workers refused it: it waits again
    one.charged()
    assert one.used_s(took) == paid_s
    other = terms(world, Claim())
    other.turn()
    assert other.used_s(took) > paid_s


async def test_an_answer_that_was_cut_off_says_only_that_it_would_have_been_longer(
    world: World,
) -> None:
    cut, free = (
        terms(world, Claim(RequestClass.STANDARD, "alice"), max_tokens) for max_tokens in (20, 500)
    )
    for _ in range(20):
        cut.finished(usage(20), FinishReason.LENGTH)
    assert cut.num_expected() == 20
    assert free.num_expected() == UNKNOWN_TOKENS
    for _ in range(20):
        free.finished(usage(60), FinishReason.STOP)
    assert free.num_expected() == 60
    assert free.num_expected(num_emitted=50) == 10
    assert free.to_come(50).halves == (10,)


async def test_what_was_cached_is_not_paid_for_nor_what_was_resumed_as_an_answer(
    world: World,
) -> None:
    nobody, guess = terms(world, NO_CLAIM), EngineRates()
    nobody.turn()
    taken_s = nobody.used_s(usage(12, num_cached=16, num_resumed=2))
    assert taken_s == pytest.approx(guess.cost_s(len(PROMPT) - 16, 10))


async def test_tokens_that_a_client_sends_along_are_computed_and_paid_for_as_a_prompt(
    world: World,
) -> None:
    """Else whoever sends long prompts so has the engines for nothing."""
    one, guess = resumed(world, 1000, 1010), EngineRates()
    turn = one.turn()
    assert turn.start_s == pytest.approx(guess.cost_s(len(PROMPT) + 1000, 0))
    assert turn.cost_s == pytest.approx(guess.cost_s(len(PROMPT) + 1000, 10))
    took_s = one.used_s(usage(1004, num_cached=16, num_resumed=1000))
    assert took_s == pytest.approx(guess.cost_s(len(PROMPT) - 16 + 1000, 4))


@pytest.mark.parametrize(
    ("num_output", "first_s", "last_s", "ttft_s", "tpot_s"),
    [(5, 103.0, 105.0, 3.0, 0.5), (1, 103.0, 103.0, 3.0, None), (0, None, 0.0, None, None)],
)
async def test_what_became_of_it_is_told_beside_what_was_wanted_when_it_came(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    num_output: int,
    first_s: float | None,
    last_s: float,
    ttft_s: float | None,
    tpot_s: float | None,
) -> None:
    now_s, told = 100.0, list[EndedRequest]()
    monkeypatch.setattr("router.request.terms.time.monotonic", lambda: now_s)
    monkeypatch.setattr(world.services.policy, "ended_as", told.append)
    claim = Claim(RequestClass.STANDARD, "", 107.0, 0.25)
    asked = terms(world, claim)
    now_s = 120.0
    asked.ended(usage(num_output, num_cached=16), first_s, last_s)
    num_missing = len(PROMPT) - 16
    assert told == [EndedRequest(100.0, 120.0, num_missing, Objectives(7.0, 0.25), ttft_s, tpot_s)]


async def test_the_policy_is_told_how_long_an_answer_was_that_it_foretold(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[tuple[Forecast, int]]()
    monkeypatch.setattr(
        world.services.policy, "answered", lambda by, num_tokens: told.append((by, num_tokens))
    )
    outlook = Outlook(PREFILL, DECODE, 0.5, 0.05, 0.0, 9.0)
    forecast = Forecast(outlook, (outlook,))
    plain, again, foretold, left = (terms(world, NO_CLAIM) for _ in range(4))
    again.placed(forecast, 0)
    again.placed(None, 3)  # on another worker: of that nothing was foretold
    foretold.placed(forecast, 2)
    left.placed(forecast, 0)
    left.left(usage(9), was_taken=True)  # by its client
    for each in (plain, again, foretold):
        each.finished(usage(12), FinishReason.STOP)
    assert told == [(forecast, 10)]


async def test_what_some_worker_has_cached_costs_nothing_while_it_waits(world: World) -> None:
    dispatch, guess = world.request(), EngineRates()
    whole = guess.cost_s(len(PROMPT), 0)
    assert dispatch.turn().start_s == whole
    world.tells(DECODE, world.keys[:1])
    num_missing = len(PROMPT) - world.cluster.block_size()
    assert 0 < num_missing < len(PROMPT)
    assert dispatch.turn().start_s == guess.cost_s(num_missing, 0) < whole
    world.tells(PREFILL, world.keys)
    num_missing = max(1, len(PROMPT) - len(world.keys) * world.cluster.block_size())
    assert dispatch.turn().start_s == guess.cost_s(num_missing, 0)


async def test_what_cannot_be_kept_goes_last_only_where_it_is_not_refused(world: World) -> None:
    claim, prompt_s = Claim(first_token_due_s=50.0), EngineRates().cost_s(len(PROMPT), 0)
    for settings, latest_s in (
        ({}, None),
        ({"placement": "predicted"}, None),
        ({"placement": "predicted", "refuse_unreachable": False}, 50.0 - prompt_s),
    ):
        config = RouterConfig(model="m", **settings)
        world.services = replace(world.services, config=config)
        assert terms(world, claim).turn().latest_start_s == latest_s


def test_who_is_refused_is_told_what_it_asked_for_however_long_it_took_to_be_read(
    world: World,
) -> None:
    """20 ms, of which some went by before it was known how long its prompt is."""
    now_s = time.monotonic()
    left = terms(world, Claim(first_token_due_s=now_s + 0.016, ttft_s=0.02)).objectives()
    assert left.whole_ttft_s == 0.02
    assert left.ttft_s is not None
    assert left.ttft_s <= 0.016
    assert not left.has_deadline_first
    bound = Claim(first_token_due_s=now_s + 0.016, ttft_s=0.02, has_deadline_first=True)
    assert terms(world, bound).objectives().has_deadline_first
    unasked = terms(world, Claim(first_token_due_s=now_s + 0.016)).objectives()
    assert unasked.whole_ttft_s == pytest.approx(0.016, abs=0.1)


@pytest.mark.parametrize("ttft_ms", [40_000, 60_000])
def test_whoever_asks_for_a_first_token_does_so_also_with_a_deadline_before_it(
    world: World, ttft_ms: int
) -> None:
    """Else whoever waits less long for its answer would be placed without regard to it."""
    classes = ServiceClasses(ClassesSettings(), SettingsObjectives(), time.monotonic)
    deadline_s = time.monotonic() + 50.0
    asked = classes.claim(ServiceLevel(ttft_ms=ttft_ms), NOBODY, deadline_s)
    assert terms(world, asked).objectives().are_asked_for
    assert not terms(world, classes.claim(NO_LEVEL, NOBODY, deadline_s)).objectives().are_asked_for

"""What one request waits by, is charged for, and teaches of its length."""

from dataclasses import replace

import pytest

from diptych.request_class import RequestClass
from router.config import RouterConfig
from router.generation.answer import Usage
from router.placement.claim import NO_CLAIM, Claim
from router.placement.engine_seconds import EngineRates
from router.placement.fair_queue import Turn
from router.request.terms import Terms
from tests.unit.router.request.dispatch_world import PROMPT, World, opened, resolved


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return opened(monkeypatch)


def terms(world: World, claim: Claim, max_tokens: int = 50) -> Terms:
    return Terms(resolved(claim=claim, max_tokens=max_tokens), world.services)


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
        alice.finished(usage(30))
    assert alice.turn().cost_s == pytest.approx(guess.cost_s(len(PROMPT), 30))
    terms(world, Claim(RequestClass.BATCH, "alice"), max_tokens=1).finished(usage(1))
    assert alice.turn().cost_s == pytest.approx(guess.cost_s(len(PROMPT), 30))


async def test_what_was_cached_and_what_was_resumed_is_not_paid_for(world: World) -> None:
    nobody, guess = terms(world, NO_CLAIM), EngineRates()
    nobody.turn()
    taken_s = nobody.used_s(usage(12, num_cached=16, num_resumed=2))
    assert taken_s == pytest.approx(guess.cost_s(len(PROMPT) - 16, 10))


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

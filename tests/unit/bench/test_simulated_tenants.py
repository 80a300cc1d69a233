"""What tenants and classes get of a simulated cluster that they keep busy."""

from functools import cache
from typing import Literal

import pytest

from tests.bench.simulated_tenants import BATCH, CHUNK_S, REALTIME, Bench, Served, Source

BY_FORECAST = Bench("predicted")
SMALL, LARGE = Source("small", 12.0, 128), Source("large", 6.0, 512)


@cache
def two_that_always_wait() -> Served:
    return BY_FORECAST.run([SMALL, LARGE], 45.0)


def test_two_that_always_wait_share_alike() -> None:
    assert two_that_always_wait().share("small", 15.0, 45.0) == pytest.approx(0.5, abs=0.03)


def test_who_comes_back_saved_nothing_up() -> None:
    back = SMALL._replace(pause_s=(10.0, 30.0))
    assert BY_FORECAST.run([back, LARGE], 50.0).share("small", 38.0, 50.0) <= 0.55


def test_batch_below_realtime_has_its_weight() -> None:
    urgent = [Source(f"r{n}", 1.0, request_class=REALTIME) for n in range(10)]
    lines = Source("batch", 2.0, request_class=BATCH)
    assert BY_FORECAST.run([*urgent, lines], 90.0).share("batch", 30.0, 90.0) >= 0.9 / 9


def test_of_one_tenant_no_more_is_answered() -> None:
    apart = two_that_always_wait().num_tokens()
    together = BY_FORECAST.run([SMALL, LARGE._replace(tenant="small")], 45.0).num_tokens()
    assert apart >= 0.95 * together


@pytest.mark.parametrize(("placement", "most"), [("least-loaded", 1.3), ("predicted", 1.35)])
def test_a_light_tenant_hardly_waits_for_a_flood(
    placement: Literal["least-loaded", "predicted"], most: float
) -> None:
    """What workers had accepted of the flood made it wait for 13 s."""
    light, flood = Source("light", 0.3), Source("flood", 10.0)
    alone_s = Bench(placement).run([light], 300.0).p95_s("light")
    beside_s = Bench(placement).run([flood, light], 300.0).p95_s("light")
    assert beside_s <= most * alone_s + CHUNK_S


def test_one_tenants_flood_is_answered_as_fast_as_when_all_was_sent_ahead() -> None:
    flood = Source("flood", 10.0)
    for placement in ("least-loaded", "predicted"):
        ahead = Bench(placement, 1e9).run([flood], 100.0).num_tokens()
        assert Bench(placement).run([flood], 100.0).num_tokens() >= 0.98 * ahead

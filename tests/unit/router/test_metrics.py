"""What is counted, and what is read of the router's parts at each scrape."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from diptych.errors import all_reasons
from diptych.request_class import RequestClass
from diptych.telemetry.metrics import Metrics
from router.cluster.worker_clock import ClockOffset
from router.metrics import OUTCOMES, read_placement, read_pools, read_room
from router.placement.cache_index import CacheIndex
from router.placement.guard import Regime
from router.placement.guarded import Guarded
from router.placement.least_loaded import LeastLoaded
from tests import metrics


def told(*register: Callable[[Metrics], None]) -> Callable[..., float | None]:
    """What a scrape says of a metric, by its name without prefix."""
    registry = CollectorRegistry()
    for each in register:
        each(Metrics(registry))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"diptych_{name}", labels)

    return value


def test_each_reason_of_an_error_is_an_outcome() -> None:
    assert set(OUTCOMES) == {"ok", "cancelled", *all_reasons()}
    assert {"QUEUE_FULL", "STEP_FAILED"} <= set(OUTCOMES)


def test_how_full_the_room_is() -> None:
    room = SimpleNamespace(num_waiting=2, num_placed=3, num_waiting_of=list(RequestClass).index)
    value = told(lambda made: read_room(made, room))
    assert value("router_requests_waiting") == 2
    assert value("router_requests_placed") == 3
    waiting = [value("router_class_requests_waiting", **{"class": each}) for each in RequestClass]
    assert waiting == [0, 1, 2]


def test_how_the_pools_are_and_how_long_their_source_was_silent() -> None:
    clocks = [("p:1", ClockOffset(-3.0, 0.25))]
    pools = SimpleNamespace(num_proven_pairs=4, num_ready=(1, 2), clock_offsets=lambda: clocks)
    source: Any = SimpleNamespace(age_s=7.5)
    value = told(lambda made: read_pools(made, pools, source))
    assert value("router_proven_pairs") == 4
    assert value("router_workers_ready", role="prefill") == 1
    assert value("router_workers_ready", role="decode") == 2
    assert value("router_discovery_age_seconds") == 7.5
    assert value("router_worker_clock_offset_seconds", worker="p:1") == -3.0
    assert value("router_worker_clock_uncertainty_seconds", worker="p:1") == 0.25


def test_how_much_is_cached() -> None:
    policy: Any = SimpleNamespace(cache=SimpleNamespace(num_blocks=4))
    assert told(lambda made: read_placement(made, policy))("router_cached_blocks") == 4


def test_a_scraper_is_told_that_placement_is_fixed() -> None:
    plain = LeastLoaded(CacheIndex(9), local_below_tokens=0, allow_local=True, allow_recompute=True)
    policy = Guarded(plain, lambda: 0.5)
    registry = CollectorRegistry()
    read_placement(Metrics(registry), policy)

    def scraped() -> float:
        return metrics.parse(generate_latest(registry).decode())["diptych_router_placement_fixed"]

    assert scraped() == 0
    policy.guard.regime = Regime.APART
    assert scraped() == 1
    assert told(lambda made: read_placement(made, plain))("router_placement_fixed") is None

"""Routers' indexes are what is in the pools, whatever was lost, broken or restarted on the way."""

import pytest

from tests.cache_events import CacheEvents

NUM_EVENTS = 10_000  # python -m tests.bench.cache_index does a million
NUM_CHECKS = 10


@pytest.mark.parametrize("seed", [1, 2])
def test_two_routers_know_what_three_pools_hold(seed: int) -> None:
    print("seed", seed)  # noqa: T201 - which to give to the long form
    events = CacheEvents(seed)
    for _ in range(NUM_CHECKS):
        events.run(NUM_EVENTS // NUM_CHECKS // 2)
        events.check()
    happened = ("asked anew", "lost messages", "broken streams", "worker restarts")
    assert all(events.counts[what] for what in happened), events.counts

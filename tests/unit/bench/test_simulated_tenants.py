"""What tenants and classes get of a simulated cluster that they keep busy."""

import pytest

from tests.bench.simulated_tenants import BATCH, REALTIME, Bench, Source

SHORT = Bench("predicted", 1024)
SMALL, LARGE = Source("small", 12.0, 128), Source("large", 6.0, 512)


def test_two_that_always_wait_share_alike() -> None:
    assert SHORT.run([SMALL, LARGE], 45.0).share("small", 15.0, 45.0) == pytest.approx(
        0.5, abs=0.03
    )


def test_who_comes_back_saved_nothing_up() -> None:
    back = SMALL._replace(pause_s=(10.0, 30.0))
    assert SHORT.run([back, LARGE], 50.0).share("small", 38.0, 50.0) <= 0.55


def test_batch_below_realtime_has_its_weight() -> None:
    urgent = [Source(f"r{n}", 1.0, request_class=REALTIME) for n in range(10)]
    lines = Source("batch", 2.0, request_class=BATCH)
    assert SHORT.run([*urgent, lines], 90.0).share("batch", 30.0, 90.0) >= 0.9 / 9


def test_of_one_tenant_no_more_is_answered() -> None:
    apart = SHORT.run([SMALL, LARGE], 45.0).num_tokens()
    together = SHORT.run([SMALL, LARGE._replace(tenant="small")], 45.0).num_tokens()
    assert apart >= 0.95 * together

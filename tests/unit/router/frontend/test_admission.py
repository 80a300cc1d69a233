"""Room for requests is counted in bytes too."""

from types import SimpleNamespace
from typing import Any

import pytest

from diptych.errors import QueueFullError
from router.config import RouterConfig
from router.frontend.admission import Admission


def admission(max_open_bytes: int) -> Admission:
    unused: Any = SimpleNamespace()
    config = RouterConfig(model="m", decode=["a:1"], max_open_bytes=max_open_bytes)
    return Admission(unused, unused, config)


async def test_open_requests_have_a_budget_of_bytes() -> None:
    door = admission(100)
    with door.hold(60):
        with pytest.raises(QueueFullError), door.hold(41):
            raise AssertionError("let in")
        with door.hold(40):
            assert door.num_open == 2
        with door.hold(40):
            pass
    assert door.num_open == 0
    with door.hold(100):
        pass
    await door.wait_idle()


async def test_a_request_that_fails_is_counted_out() -> None:
    door = admission(100)
    with pytest.raises(KeyError), door.hold(100):
        raise KeyError
    with door.hold(100):
        assert door.num_open == 1

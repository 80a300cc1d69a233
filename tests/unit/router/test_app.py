"""What the server takes is what the router takes; what its process sets."""

import gc
import runpy
import sys

import pytest

from router.app import public_edge
from router.config import RouterConfig


def test_the_servers_limits_cover_what_the_router_takes() -> None:
    """Tokenising, waiting for a worker, queued, on workers; and health checks beside them."""
    config = RouterConfig(
        model="m", decode=["a:1"], max_queue=10, max_concurrent=100, max_request_bytes=1000
    )
    edge = public_edge(config)
    assert edge.max_concurrent_streams > 100 + 3 * 10 + 2
    assert edge.max_concurrent_rpcs > edge.max_concurrent_streams
    assert edge.max_receive_bytes == 1500


def test_its_process_looks_for_cycles_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    thresholds = gc.get_threshold()
    monkeypatch.setattr(sys, "argv", ["router", "--no-such-setting", "1"])
    try:
        with pytest.raises(SystemExit):
            runpy.run_module("router", run_name="__main__")
        assert gc.get_threshold() == (10_000, *thresholds[1:])
    finally:
        gc.set_threshold(*thresholds)

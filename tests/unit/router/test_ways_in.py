"""What the server takes is what the router takes; what clients are told."""

import pytest

from diptych import settings
from router.config import RouterConfig
from router.frontend.callers.callers import Anybody, KnownCallers
from router.ways_in import is_cluster_told, public_edge


def test_the_servers_limits_cover_what_the_router_takes() -> None:
    """Tokenising, waiting for a worker, queued, on workers; and health checks beside them."""
    config = RouterConfig(
        model="m", decode=["a:1"], max_queue=10, max_concurrent=100, max_request_bytes=1000
    )
    edge = public_edge(config)
    assert edge.max_concurrent_streams > 100 + 3 * 10 + 2
    assert edge.max_concurrent_rpcs > edge.max_served > edge.max_concurrent_streams
    assert edge.max_receive_bytes == 1500
    assert edge.max_slow == config.max_open_bytes // 1500
    large = config.model_copy(update={"max_open_bytes": 1000})
    assert public_edge(large).max_slow == 1


@pytest.mark.parametrize(
    ("args", "is_told", "is_told_with_keys"),
    [
        ([], True, False),
        (["--cluster-view", "unless-keyed"], True, False),
        (["--cluster-view", "always"], True, True),
        (["--cluster-view", "never"], False, False),
    ],
)
def test_who_is_told_how_the_pools_are(
    args: list[str], is_told: bool, is_told_with_keys: bool
) -> None:
    args = ["--model", "m", "--decode", "a:1", *args]
    config = settings.load(RouterConfig, args, prog="router", env_prefix="DIPTYCH_ROUTER_")
    assert is_cluster_told(config, Anybody()) is is_told
    assert is_cluster_told(config, KnownCallers(None)) is is_told_with_keys

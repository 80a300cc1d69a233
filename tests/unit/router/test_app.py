"""What the server takes is what the router takes."""

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

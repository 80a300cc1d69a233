"""Settings that gRPC could not hold stop the router at its start, with one line."""

import pytest

from diptych import settings
from diptych.errors import ConfigurationError
from diptych.rpc.server import make_server
from router.app import public_edge
from router.config import RouterConfig

INT32 = 2**31 - 1


def load(*args: str) -> RouterConfig:
    whole = ["--model", "m", "--decode", "a:1", *args]
    return settings.load(RouterConfig, whole, prog="diptych router", env_prefix="DIPTYCH_ROUTER_")


@pytest.mark.parametrize(
    "name",
    [
        "max-connection-age-s",
        "max-connection-grace-s",
        "timers.keepalive-s",
        "timers.keepalive-answer-s",
    ],
)
@pytest.mark.parametrize("value", ["inf", "nan", "1e400", "2147484", "0", "0.0001"])
def test_a_time_out_of_range_is_one_line(name: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--{name}: .*'{value}'") as caught:
        load(f"--{name}", value)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("name", ["max-queue", "max-concurrent", "max-request-bytes"])
def test_a_count_out_of_range_is_one_line(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--{name}: .*'{INT32}'") as caught:
        load(f"--{name}", str(INT32))
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("name", ["no-worker-s", "drain-s", "heartbeat-s"])
@pytest.mark.parametrize("value", ["inf", "nan"])
def test_every_timer_is_finite(name: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--timers.{name}: .*'{value}'"):
        load(f"--timers.{name}", value)


async def test_grpc_holds_the_largest_of_all() -> None:
    seconds, count = "2000000", str(10**8)
    config = load(
        *("--max-connection-age-s", seconds, "--max-connection-grace-s", seconds),
        *("--timers.keepalive-s", seconds, "--timers.keepalive-answer-s", seconds),
        *("--max-queue", count, "--max-concurrent", count, "--max-request-bytes", str(2**30)),
    )
    edge = public_edge(config)
    assert edge.max_concurrent_streams <= INT32
    assert edge.max_receive_bytes <= INT32
    for server in (make_server(config.timers), make_server(config.timers, edge)):
        await server.stop(None)

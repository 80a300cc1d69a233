"""Settings that gRPC could not hold stop the router at its start, with one line."""

import pytest

from diptych import settings
from diptych.errors import ConfigurationError
from diptych.request_class import RequestClass
from diptych.rpc.server import make_server
from diptych.tenant import MAX_LIMIT, Limits
from router.config import RouterConfig
from router.placement.runway import Runway
from router.ways_in import public_edge

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


@pytest.mark.parametrize(
    "name",
    [
        "max-pending-prefill-tokens",
        "quota.requests-per-minute",
        "quota.tokens-per-minute",
        "quota.max-concurrent",
    ],
)
@pytest.mark.parametrize("value", [str(MAX_LIMIT + 1), "9" * 400])
def test_a_count_that_no_division_could_hold_is_one_line(name: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^--{name}: .*'{value}'") as caught:
        load(f"--{name}", value)
    assert "\n" not in caught.value.message


def test_the_largest_counts_can_be_reckoned_with() -> None:
    most = str(MAX_LIMIT)
    config = load("--max-pending-prefill-tokens", most, "--quota.tokens-per-minute", most)
    assert config.quota.limits.tokens_per_minute == MAX_LIMIT
    runway = Runway(config.max_pending_prefill_tokens, config.prefill_runway_s)
    assert runway.is_open_beyond(MAX_LIMIT, 0.0)


@pytest.mark.parametrize("name", ["no-worker-s", "drain-s", "heartbeat-s"])
@pytest.mark.parametrize("value", ["inf", "nan"])
def test_every_timer_is_finite(name: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--timers.{name}: .*'{value}'"):
        load(f"--timers.{name}", value)


@pytest.mark.parametrize("name", ["prefill-runway-s", "trace-caller-per-s", "trace-slow-s"])
@pytest.mark.parametrize("value", ["inf", "nan", "1e400"])
def test_every_number_is_finite(name: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^--{name}: .*finite.*'{value}'"):
        load(f"--{name}", value)


OBJECTIVES = [
    *("ttft-objective-ms", "tpot-objective-ms"),
    *("classes.realtime.ttft-ms", "classes.standard.tpot-ms", "classes.batch.ttft-ms"),
]


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("value", ["0", "1e-320", "0.00099", "86400000.1", "1e300", "inf", "nan"])
def test_an_objective_is_one_that_a_client_could_ask_for(name: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^--{name}: .*'{value}'") as caught:
        load(f"--{name}", value)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("value", ["0.001", "86400000"])
def test_the_least_and_the_greatest_objective(name: str, value: str) -> None:
    load(f"--{name}", value)


@pytest.mark.parametrize("name", ["realtime", "standard", "batch"])
@pytest.mark.parametrize("value", ["0", "-1", "5e-324", "0.00099", "1000.1", "1e308", "nan", "inf"])
def test_a_classs_weight_leaves_others_countable(name: str, value: str) -> None:
    with pytest.raises(
        ConfigurationError, match=f"--classes.weights.{name}: .*'{value}'"
    ) as caught:
        load(f"--classes.weights.{name}", value)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(("value", "weight"), [("0.001", 0.001), ("1000", 1000.0)])
def test_the_least_and_the_greatest_weight(value: str, weight: float) -> None:
    config = load("--classes.weights.realtime", value)
    assert config.classes.weight_of[RequestClass.REALTIME] == weight


@pytest.mark.parametrize(
    "args", [("--max-request-bytes", str(2**27)), ("--max-open-bytes", str(2**20))]
)
def test_one_request_that_is_not_too_large_has_room_when_it_is_alone(args: tuple[str, ...]) -> None:
    """Else it is told to come again later, for ever."""
    with pytest.raises(ConfigurationError, match=r"^--max-open-bytes: .* --max-request-bytes"):
        load(*args)
    load(*args, *("--max-request-bytes", str(2**20), "--max-open-bytes", str(2**20)))


async def test_grpc_holds_the_largest_of_all() -> None:
    seconds, count, num_bytes = "2000000", str(10**8), str(2**30)
    config = load(
        *("--max-connection-age-s", seconds, "--max-connection-grace-s", seconds),
        *("--timers.keepalive-s", seconds, "--timers.keepalive-answer-s", seconds),
        *("--max-queue", count, "--max-concurrent", count),
        *("--max-request-bytes", num_bytes, "--max-open-bytes", num_bytes),
    )
    edge = public_edge(config)
    assert edge.max_concurrent_streams <= INT32
    assert edge.max_receive_bytes <= INT32
    for server in (make_server(config.timers), make_server(config.timers, edge)):
        await server.stop(None)


ISSUED = ("--jwt.issuer", "https://login.example", "--jwt.audience", "diptych")


def test_quotas_are_none_unless_said() -> None:
    assert load().quota.limits == Limits()
    told = load("--quota.requests-per-minute", "60", "--quota.tokens-per-minute", "9").quota
    assert told.limits == Limits(60, 9, None)
    with pytest.raises(ConfigurationError, match=r"--quota.max-concurrent: .*'0'"):
        load("--quota.max-concurrent", "0")


def test_control_tokens_in_contents_are_plain_text_where_clients_have_keys() -> None:
    assert not load().has_inert_contents
    assert load("--control-tokens", "inert").has_inert_contents
    assert load("--api-keys", "keys").has_inert_contents
    issuer = ("--jwt.issuer", "https://i", "--jwt.audience", "a")
    assert load(*issuer).has_inert_contents
    assert not load("--api-keys", "keys", "--control-tokens", "parsed").has_inert_contents


def test_tokens_are_of_one_issuer_for_somebody() -> None:
    jwt = load(*ISSUED).jwt
    assert (jwt.issuer, jwt.audience) == ("https://login.example", ["diptych"])
    assert jwt.algorithms == ("RS256", "ES256")
    assert load().jwt.issuer is None


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (ISSUED[:2], "--jwt.audience: is required by --jwt.issuer"),
        (ISSUED[2:], "--jwt.issuer: is required by --jwt.audience"),
        (("--jwt.tenant-claim", "team"), "--jwt.issuer: is required by --jwt.tenant-claim"),
        (
            (*ISSUED, "--jwt.jwks", "keys", "--jwt.jwks-url", "https://a.example/keys"),
            "--jwt.jwks-url: no one is asked",
        ),
        ((*ISSUED, "--jwt.jwks", "keys", "--jwt.ca", "ca"), "--jwt.ca: no one is asked"),
        ((*ISSUED, "--jwt.algorithms", "HS256"), "--jwt.algorithms: "),
        ((*ISSUED, "--jwt.algorithms", "none"), "--jwt.algorithms: "),
        (("--jwt.issuer", "http://login.example", *ISSUED[2:]), "--jwt.issuer: expected https"),
        (("--jwt.issuer", "login.example", *ISSUED[2:]), "--jwt.issuer: expected https"),
        ((*ISSUED, "--jwt.jwks-url", "https://u:p@a.example"), "--jwt.jwks-url: expected no user"),
        ((*ISSUED, "--jwt.leeway-s", "601"), "--jwt.leeway-s: "),
        ((*ISSUED, "--jwt.refresh-s", "0"), "--jwt.refresh-s: "),
    ],
)
def test_what_is_wrong_with_tokens_names_the_setting(args: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says) as caught:
        load(*args)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("host", ["127.0.0.1:8080", "localhost", "[::1]:80"])
def test_only_the_own_machine_is_asked_without_tls(host: str) -> None:
    assert load(*ISSUED, "--jwt.jwks-url", f"http://{host}/keys").jwt.jwks_url


@pytest.mark.parametrize("url", ["https://u:secret@a.example", "http://a.example/?key=secret"])
def test_a_secret_in_an_address_is_not_repeated(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"jwks-url: expected no user") as caught:
        load(*ISSUED, "--jwt.jwks-url", url)
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(
    ("args", "addresses"),
    [
        (["[::1]:5"], ["[::1]:5"]),
        (["[::1]:5,a:1", "[fe80::1%eth0]:6"], ["[::1]:5", "a:1", "[fe80::1%eth0]:6"]),
        (["a:1, b:2"], ["a:1", "b:2"]),
        (['["[::1]:5", "a:1"]', "b:2"], ["[::1]:5", "a:1", "b:2"]),
        (["[]"], []),
    ],
)
def test_brackets_of_an_ipv6_address_are_none_of_a_list(
    args: list[str], addresses: list[str]
) -> None:
    assert load(*(f"--prefill={each}" for each in args)).prefill == addresses

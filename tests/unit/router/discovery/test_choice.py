"""One source is chosen, and only that one has settings."""

import pytest

from diptych import settings
from diptych.errors import ConfigurationError
from router.config import RouterConfig
from router.discovery.choice import choose
from router.discovery.dns import DnsDiscovery
from router.discovery.file import FileDiscovery
from router.discovery.source import StaticDiscovery


def load(*args: str) -> RouterConfig:
    return settings.load(
        RouterConfig, ["--model", "m", *args], prog="diptych router", env_prefix="DIPTYCH_ROUTER_"
    )


@pytest.mark.parametrize(
    ("args", "source"),
    [
        (["--decode", "a:1"], StaticDiscovery),
        (["--discovery", "file", "--file.path", "workers.yaml"], FileDiscovery),
        (["--discovery", "dns", "--dns.decode", "_grpc._tcp.decode"], DnsDiscovery),
    ],
)
def test_the_source_that_is_named_is_made(args: list[str], source: type) -> None:
    made = choose(load(*args), lambda: 5.0)
    assert isinstance(made, source)
    assert made.age_s == 0.0


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--discovery", "file"], "--file.path: is required by --discovery file"),
        (
            ["--discovery", "file", "--file.path", "f", "--decode", "a:1"],
            "--decode: belongs to --discovery static, but that is file",
        ),
        (
            ["--decode", "a:1", "--file.interval-s", "3"],
            "--file.interval-s: belongs to --discovery file, but that is static",
        ),
        (["--discovery", "dns"], "--dns.decode: is required by --discovery dns"),
        (
            ["--discovery", "dns", "--dns.decode", "decode"],
            r"--dns.decode: expected name:port, or _port._tcp.name, found 'decode'",
        ),
        (["--discovery", "dns", "--dns.decode", "_g._tcp.d:1"], "--dns.decode: expected name.*"),
        (
            ["--discovery", "dns", "--dns.decode", "a:1", "--dns.decode", "a:1"],
            "--dns.decode: a name is listed twice",
        ),
        (
            ["--discovery", "dns", "--dns.decode", "a:1", "--dns.server", "dns.example:53"],
            r"--dns.server: expected ip:port \(got 'dns.example:53'\)",
        ),
        (["--decode", "a:1", "--dns.server", "10.0.0.1"], r"--dns.server: expected ip:port.*"),
        (["--discovery", "guess"], r"--discovery: Input should be .*\(got 'guess'\)"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(args: list[str], line: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{line}$"):
        load(*args)


def test_a_static_list_needs_a_decode_worker() -> None:
    with pytest.raises(ConfigurationError, match="--decode"):
        choose(load("--prefill", "a:1"), lambda: 0.0)

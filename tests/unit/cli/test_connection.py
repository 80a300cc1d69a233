"""Whom commands ask is said as host:port, and no port is taken for another."""

import re
import socket
from collections.abc import Callable

import pytest

from diptych.cli import chat, generate, health, top
from diptych.cli.connection import RouterConnection
from diptych.cli.main import main
from diptych.errors import ConfigurationError

WRONG = [
    "router:99999",
    "router:65536",
    "router:0",
    "router:00000099999",
    "router:-1",
    "router",
    ":50051",
    "unix:1",
    "",
]


@pytest.mark.parametrize("run", [chat.run, generate.run, health.run, top.run])
@pytest.mark.parametrize("address", WRONG)
def test_a_port_that_there_is_not_is_refused(run: Callable[[list[str]], int], address: str) -> None:
    """gRPC would take it for another: 99999 for 34463."""
    with pytest.raises(ConfigurationError, match=r"^--address: .*host:port") as caught:
        run(["--address", address])
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("address", ["a:1,b:99999", "a:1,,b:1", "a:1,"])
def test_each_of_several_routers_has_a_port(address: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^--address: .*host:port"):
        top.run(["--address", address])


@pytest.mark.parametrize("address", ["a:1", "a:1, b:65535", "[::1]:50051", "10.0.0.1:1,h.x:2"])
def test_one_or_several_may_be_asked(address: str) -> None:
    assert RouterConnection(address=address).address == address


@pytest.mark.parametrize("address", ["http://a:1", "https://a", "grpc://a:1"])
def test_what_stands_before_an_address_is_named(address: str) -> None:
    """As the client does."""
    with pytest.raises(ConfigurationError, match="nothing before it"):
        top.run(["--address", address, "--once"])


@pytest.mark.parametrize("command", [["generate", "Hello"], ["chat"]])
def test_each_time_that_it_is_asked_again_is_told(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:  # that nobody listens on
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main([*command, "--address", address, "--retries", "2"]) == 1
    said = [line for line in capsys.readouterr().err.splitlines() if line]
    again = r"diptych: UNAVAILABLE: .*refused.*; asking again in 0\.[12] s"
    assert [bool(re.fullmatch(again, line)) for line in said] == [True, True, False]
    assert said[-1].startswith(f"diptych {command[0]}: UNAVAILABLE: ")

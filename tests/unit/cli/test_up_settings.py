"""What ``diptych up`` refuses before it starts anything."""

import socket

import pytest

from diptych.cli.up import UpConfig, run
from diptych.errors import ConfigurationError


@pytest.mark.parametrize(
    "args",
    [
        ["--router-args", "--api-keys keys"],
        ["--router-args", "--log-level debug --public-tls.certificate=a --public-tls.key=b"],
        ["--worker-args", "--tls.ca ca.pem"],
    ],
)
def test_locks_are_not_for_a_cluster_that_it_starts(args: list[str]) -> None:
    """It would wait for ever: it has no key to ask its router with."""
    with pytest.raises(ConfigurationError, match=rf"{args[0]}: --[a-z.-]+: not with diptych up"):
        run(args)


@pytest.mark.parametrize(
    ("asked", "numbers"),
    [
        ({}, (1, 1, 0)),
        ({"soft": 2}, (0, 0, 2)),
        ({"soft": 2, "prefill": 1}, (1, 0, 2)),
        ({"prefill": 0, "decode": 3}, (0, 3, 0)),
    ],
)
def test_how_many_workers_of_which_roles(
    asked: dict[str, int], numbers: tuple[int, int, int]
) -> None:
    plan = UpConfig(**asked).plan()
    assert (plan.num_prefill, plan.num_decode, plan.num_soft) == numbers
    num_prefill, num_decode, num_soft = numbers
    computing = [f"p{i}" for i in range(num_prefill)] + [f"s{i}" for i in range(num_soft)]
    decoding = [f"d{i}" for i in range(num_decode)] + [f"s{i}" for i in range(num_soft)]
    assert plan.num_pairs == sum(p != d for p in computing for d in decoding)


@pytest.mark.parametrize(
    ("asked", "share"),
    [({}, "0.4500"), ({"soft": 1}, "0.9000"), ({"prefill": 1, "decode": 2}, "0.3000")],
)
def test_workers_on_one_card_share_its_memory_out(asked: dict[str, int], share: str) -> None:
    plan = UpConfig(device="cuda", worker_args="--num-blocks 8", **asked).plan()
    assert plan.worker_args[2:] == (
        *("--device", "cuda", "--gpu-memory-utilization", share),
        *("--num-blocks", "8"),
    )
    assert "--device" not in UpConfig().plan().worker_args


@pytest.mark.parametrize("flag", ["--worker-args", "--router-args"])
def test_flags_that_no_shell_would_take_are_named(flag: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{flag}: no closing quotation$"):
        run([f"{flag}=--model 'a b"])


@pytest.mark.parametrize(
    ("host", "listened_on"), [("::1", "[::1]"), ("[::1]", "[::1]"), ("10.0.0.1", "10.0.0.1")]
)
def test_an_ipv6_address_has_brackets_before_a_port(host: str, listened_on: str) -> None:
    assert UpConfig(host=host).plan().host == listened_on


@pytest.mark.parametrize("host", ["10.0..1", "h..example", "h" * 64, "."])
def test_a_host_that_none_can_be_is_one_line(host: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^--host: expected a host's name or address"):
        run(["--host", host])


def test_somebody_has_to_decode() -> None:
    with pytest.raises(ConfigurationError, match="decode"):
        run(["--decode", "0"])


def test_a_batch_server_needs_the_routers_http() -> None:
    with pytest.raises(ConfigurationError, match="--batch-port"):
        run(["--batch-port", "0", "--router-args=--no-http"])


@pytest.mark.parametrize("first", ["--port", "--http-port"])
def test_two_servers_have_no_port_in_common(first: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    ports = {"--port": "0", "--http-port": "0", first: port, "--batch-port": port}
    args = ["--model", "/nowhere", *(each for pair in ports.items() for each in pair)]
    with pytest.raises(ConfigurationError, match=f"--batch-port: cannot bind .*:{port}"):
        run(args)

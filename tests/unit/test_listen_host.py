"""What ``--listen`` says is host:port, or a line says that it is not."""

import re

import pytest

from diptych.errors import ConfigurationError
from diptych.service_host import host_of


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("127.0.0.1:0", "127.0.0.1"),
        ("localhost.:65535", "localhost."),
        ("h:0000000080", "h"),
        ("[::1]:50051", "::1"),
        ("[fe80::1%eth0]:1", "fe80::1%eth0"),
        ("bücher.example:1", "bücher.example"),
    ],
)
def test_the_host_is_what_is_before_the_port(address: str, host: str) -> None:
    assert host_of(address) == host


@pytest.mark.parametrize(
    "address",
    [
        "50051",
        ":50051",
        "h:",
        "h:65536",
        "h:-1",
        "h:000000099999",
        "h:²",  # a digit to Python, and no number
        "h:" + "9" * 5000,  # more than Python reads
        "10.0..1:50051",  # a slip that sockets do not refuse, but raise a UnicodeError for
        "h..example:50051",
        "h" * 64 + ".example:50051",
        "\udcff:50051",
    ],
)
def test_what_no_socket_can_be_asked_for_is_one_line(address: str) -> None:
    line = f"--listen: expected host:port (got {address!r})"
    with pytest.raises(ConfigurationError, match=f"^{re.escape(line)}$"):
        host_of(address)

"""What the address of a process is: host:port. Pure."""

from typing import Annotated, Final

from pydantic import AfterValidator

_LAST_PORT: Final = 65535
# Before a colon gRPC takes such a word for how the rest is to be reached.
_SCHEMES = frozenset({"dns", "ipv4", "ipv6", "unix", "unix-abstract", "vsock", "xds"})


def is_address(text: str) -> bool:
    """Whether it is host:port, and no address of another kind to gRPC.

    Which would take port 99999 for 34463.
    """
    host, colon, port = text.rpartition(":")
    is_host = bool(host) and host.isascii() and host.isprintable() and " " not in host
    is_port = port.isascii() and port.isdigit() and 0 < int(port[:6]) <= _LAST_PORT
    return bool(colon) and is_host and is_port and host.partition(":")[0] not in _SCHEMES


def is_host(text: str) -> bool:
    """Whether sockets take it for a name or an address: no part of it is empty, or too long.

    For others they raise a UnicodeError.
    """
    try:
        text.encode("idna")
    except UnicodeError:
        return False
    return True


def check_host(text: str) -> str:
    """Raises ValueError: no host can be called so."""
    if not is_host(text):
        raise ValueError("expected a host's name or address")
    return text


def check_address(text: str) -> str:
    """Raises ValueError: it is none."""
    if not is_address(text):
        raise ValueError(f"expected host:port, the port from 1 to {_LAST_PORT}")
    return text


Address = Annotated[str, AfterValidator(check_address)]
"""Of a process, as a setting."""

"""What the address of a process is: host:port. Pure."""

from typing import Annotated, Final

from pydantic import AfterValidator

LAST_PORT: Final = 65535
PORT_EXPECTED: Final = f"expected host:port, the port up to {LAST_PORT}"
# Before a colon gRPC takes such a word for how the rest is to be reached.
_SCHEMES = frozenset({"dns", "ipv4", "ipv6", "unix", "unix-abstract", "vsock", "xds"})


def is_address(text: str) -> bool:
    """Whether it is host:port, and no address of another kind to gRPC.

    Which would take port 99999 for 34463.
    """
    host, _, _ = text.rpartition(":")
    is_name = bool(host) and host.isascii() and host.isprintable() and " " not in host
    port = port_of(text)
    is_port = port is not None and 0 < port <= LAST_PORT
    return is_name and is_port and host.partition(":")[0] not in _SCHEMES


def has_own_port(target: str) -> bool:
    """Whether gRPC takes its port, if it says one, for that and no other; see ``is_address``."""
    port = port_of(target)
    return port is None or port <= LAST_PORT


def port_of(text: str) -> int | None:
    """What is behind the last colon, if it is a number; of a long one its beginning."""
    _, colon, port = text.rpartition(":")
    is_number = bool(colon) and port.isascii() and port.isdigit()
    return int(port.lstrip("0")[:6] or 0) if is_number else None


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
        raise ValueError(f"expected host:port, the port from 1 to {LAST_PORT}")
    return text


Address = Annotated[str, AfterValidator(check_address)]
"""Of a process, as a setting."""

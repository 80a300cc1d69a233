"""Addresses to which a process sends what it tells of itself. Pure."""

from urllib.parse import SplitResult, urlsplit

from diptych.address import LAST_PORT


def check_endpoint(value: str) -> str:
    """The address itself.

    Raises ValueError: it holds a secret, which would be logged with it, or its port is none, of
    which gRPC would make another.
    """
    parts = urlsplit(value if "//" in value else f"//{value}")
    if "@" in value or parts.query or parts.fragment:
        raise ValueError("expected no user, password, query and fragment (got some of them)")
    if not _has_port(parts):
        raise ValueError(f"expected a port from 1 to {LAST_PORT}")
    return value


def _has_port(parts: SplitResult) -> bool:
    """Or none, which is the protocol's own."""
    try:
        return parts.port is None or parts.port > 0
    except ValueError:
        return False

"""Addresses to which a process sends what it tells of itself. Pure."""

from urllib.parse import urlsplit


def check_endpoint(value: str) -> str:
    """The address itself. Raises ValueError: it holds a secret, which would be logged with it."""
    parts = urlsplit(value)
    if "@" in value or parts.query or parts.fragment:
        raise ValueError("expected no user, password, query and fragment (got some of them)")
    return value

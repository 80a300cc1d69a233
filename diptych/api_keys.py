"""Keys of clients: how one is made, and what is kept of it. Pure.

Keys are random and long, so a plain hash of one tells nothing of it. A file of keys has a line
for each, ``TENANT SHA256``; empty lines and those that begin with # say nothing.
"""

import hashlib
import re
import secrets
from collections.abc import Mapping

_PREFIX = "dk-"
_NUM_BYTES = 32
_LINE = re.compile(r"(\S+)\s+([0-9a-f]{64})")
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def make_key() -> str:
    """A new key, for its owner's eyes alone."""
    return _PREFIX + secrets.token_urlsafe(_NUM_BYTES)


def digest(key: str) -> str:
    """What is kept of a key: 64 hexadecimal digits."""
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


def check_tenant(name: str) -> str:
    """The name itself. Raises ValueError: no tenant can be called so."""
    if not _TENANT.fullmatch(name):
        raise ValueError("expected up to 64 letters, digits, dots, dashes and underscores")
    return name


def read_keys(text: str) -> Mapping[str, str]:
    """Of each key's digest the tenant. Raises ValueError, which names the line and not its text."""
    tenants: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = _LINE.fullmatch(line.strip())
        if found is None or not _TENANT.fullmatch(found[1]):
            raise ValueError(f"line {number}: expected a tenant and the SHA-256 of a key")
        if found[2] in tenants:
            raise ValueError(f"line {number}: the key is there already")
        tenants[found[2]] = found[1]
    return tenants

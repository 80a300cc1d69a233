"""Keys of clients: how one is made, and what is kept of it. Pure.

Keys are random and long, so a plain hash of one tells nothing of it. A file of keys has a line
for each, ``TENANT SHA256``, and after it what limits the tenant has, as ``max_concurrent=4``,
and how urgent its requests are, as ``default_class=batch``; empty lines and those that begin
with # say nothing.
"""

import hashlib
import re
import secrets
from collections.abc import Mapping

from diptych.tenant import Tenant, Terms, read_terms

_PREFIX = "dk-"
_NUM_BYTES = 32
_LINE = re.compile(r"(\S+)\s+([0-9a-f]{64})((?:\s+(?:\w+=[0-9]{1,15}|\w+_class=[a-z]+))*)")
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


def read_keys(text: str) -> Mapping[str, Tenant]:
    """Of each key's digest the tenant. Raises ValueError, which names the line and not its text.

    Limits are a tenant's, whichever of its lines says them; two that differ are refused.
    """
    names: dict[str, str] = {}
    terms: dict[str, Terms] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = _LINE.fullmatch(line.strip())
        if found is None or not _TENANT.fullmatch(found[1]):
            raise ValueError(f"line {number}: expected a tenant and the SHA-256 of a key")
        if found[2] in names:
            raise ValueError(f"line {number}: the key is there already")
        names[found[2]] = found[1]
        if found[3]:
            said = _read_terms(found[3], number)
            if terms.setdefault(found[1], said) != said:
                raise ValueError(f"line {number}: the tenant has other limits in a line before")
    return {key: Tenant(name, *terms.get(name, Terms())) for key, name in names.items()}


def _read_terms(text: str, number: int) -> Terms:
    pairs = [word.split("=") for word in text.split()]
    try:
        if len({name for name, _ in pairs}) < len(pairs):
            raise ValueError("a limit is there twice")
        return read_terms({name: int(v) if v.isdecimal() else v for name, v in pairs})
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from None

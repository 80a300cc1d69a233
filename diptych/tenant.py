"""Whose requests are, and how many of them there may be."""

from collections.abc import Mapping
from typing import NamedTuple

_MOST = 10**12


class Limits(NamedTuple):
    """What one tenant may take of a router; None: nothing is said of it."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None

    def over(self, others: "Limits") -> "Limits":
        """These, and where they say nothing what the others say."""
        return Limits(*(b if a is None else a for a, b in zip(self, others, strict=True)))


class Tenant(NamedTuple):
    """Who pays for a request; the one without a name is everybody, where nobody is known."""

    name: str
    limits: Limits = Limits()


NOBODY = Tenant("")


def read_limits(given: Mapping[str, object]) -> Limits:
    """Limits by their names. Raises ValueError, which quotes nothing but names that it knows."""
    if given.keys() - set(Limits._fields):
        raise ValueError(f"expected limits by their names: {', '.join(Limits._fields)}")
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MOST:
            raise ValueError(f"{name}: expected a whole number above 0")
    return Limits(**given)  # type: ignore[arg-type]

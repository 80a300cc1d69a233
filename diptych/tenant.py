"""Whose requests are, how many of them there may be, and how urgent."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple, TypeVar

from diptych.request_class import RequestClass, read_class

MAX_LIMIT: Final = 10**12

T = TypeVar("T")


class Limits(NamedTuple):
    """What one tenant may take of a router; None: nothing is said of it."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None

    def over(self, others: "Limits") -> "Limits":
        """These, and where they say nothing what the others say."""
        return Limits(*_over(self, others))


class Classes(NamedTuple):
    """How urgent a tenant's requests are; None: nothing is said of it."""

    default_class: RequestClass | None = None  # of those that do not say it
    highest_class: RequestClass | None = None  # the most urgent that one may be

    def over(self, others: "Classes") -> "Classes":
        """These, and where they say nothing what the others say."""
        return Classes(*_over(self, others))


class Terms(NamedTuple):
    """All that is said of a tenant."""

    limits: Limits = Limits()
    classes: Classes = Classes()


class Tenant(NamedTuple):
    """Who pays for a request; the one without a name is everybody, where nobody is known."""

    name: str
    limits: Limits = Limits()
    classes: Classes = Classes()

    def over(self, terms: Terms) -> "Tenant":
        """The same; of what nothing is said of it these hold."""
        limits, classes = self.limits.over(terms.limits), self.classes.over(terms.classes)
        return Tenant(self.name, limits, classes)


NOBODY = Tenant("")


def read_terms(given: Mapping[str, object]) -> Terms:
    """Terms by their names. Raises ValueError, which quotes nothing but names that it knows."""
    names = (*Limits._fields, *Classes._fields)
    if given.keys() - set(names):
        raise ValueError(f"expected limits by their names: {', '.join(names)}")
    limits = {name: _read_limit(name, given[name]) for name in Limits._fields if name in given}
    classes = {name: _read_class(name, given[name]) for name in Classes._fields if name in given}
    return Terms(Limits(**limits), Classes(**classes))


def _over(said: Iterable[T | None], others: Iterable[T | None]) -> Iterator[T | None]:
    return (b if a is None else a for a, b in zip(said, others, strict=True))


def _read_limit(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_LIMIT:
        raise ValueError(f"{name}: expected a whole number above 0, {MAX_LIMIT} at most")
    return value


def _read_class(name: str, value: object) -> RequestClass:
    try:
        return read_class(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None

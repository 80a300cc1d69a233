"""How urgent a request is beside others: what it is promised, and its share where many wait."""

import enum


class RequestClass(enum.StrEnum):
    """By their names in settings, bodies and metrics, the most urgent first."""

    REALTIME = "realtime"
    STANDARD = "standard"
    BATCH = "batch"

    @property
    def tier(self) -> int:
        """By which workers know it: from 1, the most urgent."""
        return 1 + list(RequestClass).index(self)

    def is_above(self, other: "RequestClass") -> bool:
        """Whether it is the more urgent one."""
        return self.tier < other.tier


def read_class(name: object) -> RequestClass:
    """The class of that name. Raises ValueError, which quotes nothing but names that it knows."""
    if isinstance(name, str) and name in set(RequestClass):
        return RequestClass(name)
    raise ValueError(f"expected one of {', '.join(RequestClass)}")

"""How urgent a request is beside others: what it is promised, and its share where many wait."""

import enum


class RequestClass(enum.StrEnum):
    """By their names in settings, bodies and metrics, the most urgent first."""

    REALTIME = "realtime"
    STANDARD = "standard"
    BATCH = "batch"

    def is_above(self, other: "RequestClass") -> bool:
        """Whether it is the more urgent one."""
        order = list(RequestClass)
        return order.index(self) < order.index(other)


def read_class(name: object) -> RequestClass:
    """The class of that name. Raises ValueError, which quotes nothing but names that it knows."""
    if isinstance(name, str) and name in set(RequestClass):
        return RequestClass(name)
    raise ValueError(f"expected one of {', '.join(RequestClass)}")

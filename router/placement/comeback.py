"""How soon whoever is refused may come back. Pure."""

from collections.abc import Callable
from typing import Final

_LEAST_S: Final = 0.25
_MOST_S: Final = 30.0


def comeback_s(expected_s: float, chance: Callable[[], float]) -> float:
    """The time after which to ask again for what is expected in ``expected_s``, within bounds.

    Half of it is left to ``chance``, uniform in [0, 1), so that those who were refused together do
    not come back together.
    """
    return min(max(expected_s, _LEAST_S), _MOST_S) * (0.5 + chance())

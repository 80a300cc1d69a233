"""What is said to a request whose first token would be too late. Pure."""

from collections.abc import Callable
from typing import Final

from router.placement.types import Unreachable

_LEAST_RETRY_S: Final = 0.25
_MOST_RETRY_S: Final = 30.0


def too_late(ttft_s: float, within_s: float, chance: Callable[[], float] | None) -> Unreachable:
    """It would come in ``ttft_s`` and is wanted ``within_s``. It may be asked for again when what
    is before it has probably become so much less; half of that by ``chance``, uniform in [0, 1),
    so that who is refused together does not come back together. None: it is always too late.
    """
    what = f"the first token is wanted within {max(0.0, within_s):.3f} s"
    retry_after_s = None
    if chance is not None:
        late_s = min(max(ttft_s - within_s, _LEAST_RETRY_S), _MOST_RETRY_S)
        retry_after_s = late_s * (0.5 + chance())
    return Unreachable(f"{what} and foretold in {ttft_s:.3f} s", retry_after_s)

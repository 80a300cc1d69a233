"""What is said to a request whose first token would be too late, or all tokens. Pure."""

from collections.abc import Callable
from typing import Final

from router.placement.comeback import comeback_s
from router.placement.placement import Unreachable
from router.placement.query import Objectives

_HARDLY_S: Final = 0.01  # since it came: not worth a word


def too_late(
    ttft_s: float, objectives: Objectives, chance: Callable[[], float] | None
) -> Unreachable:
    """It would come in ``ttft_s`` from now, later than is wanted. It may be asked for again when
    what is before it has probably become so much less; half of that by ``chance``. None: it is
    always too late.
    """
    left_s = max(0.0, objectives.ttft_s or 0.0)
    whole_s = objectives.whole_ttft_s or left_s
    wanted, foretold = "ttft_ms: the first token", "foretold"
    if objectives.has_deadline_first:
        wanted, foretold = "deadline: the answer", "its first token foretold"
    what = f"{wanted} is wanted within {whole_s:.3f} s"
    if whole_s - left_s > _HARDLY_S:
        what += f", of which {left_s:.3f} are left,"
    retry_after_s = None if chance is None else comeback_s(ttft_s - left_s, chance)
    return Unreachable(f"{what} and {foretold} in {ttft_s:.3f} s", retry_after_s)


def too_slow(token_s: float, wanted_s: float) -> Unreachable:
    """The fastest worker would need ``token_s`` for each token of it alone."""
    wanted = f"tpot_ms: a token is wanted each {1e3 * wanted_s:.4g} ms"
    return Unreachable(f"{wanted}, and no worker makes one in less than {1e3 * token_s:.4g}", None)

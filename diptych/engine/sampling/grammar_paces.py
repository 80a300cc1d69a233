"""What grammars may take of the time that all rows of a step wait for. Pure; clock passed in.

Processor time: so much for each mask and each token, and so much at once. Whoever takes more
ends, and for a while nobody begins; those that run already may be no slower than others.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from diptych.errors import InvalidRequestError

# Real schemas take 0.04 ms for a mask with 49,152 tokens, the worst of them 0.2; a mask that has
# to look at each token (of what a text may not have) takes 5 ns for each.
MIN_ALLOWANCE_S: Final = 0.001
ALLOWANCE_PER_TOKEN_S: Final = 40e-9  # of the vocabulary
MAX_SAVED_S: Final = 0.25
REFUSED_S: Final = 30.0  # others lose a hundredth of their time to what is always too slow
_MAX_PACES: Final = 1024  # grammars


@dataclass(slots=True)
class Pace:
    """One grammar's, for all outputs that are held to it."""

    clock: Callable[[], float]
    saved_s: float = MAX_SAVED_S
    refused_until_s: float = 0.0

    def check(self) -> None:
        """An output begins. Raises InvalidRequestError: another took too long of late."""
        if self.clock() < self.refused_until_s:
            raise _too_slow()

    def spend(self, spent_s: float, allowed_s: float) -> None:
        """Raises InvalidRequestError: that is too long. Others have all they may take again."""
        self.saved_s = min(MAX_SAVED_S, self.saved_s + allowed_s) - spent_s
        if self.saved_s < 0:
            self.saved_s = MAX_SAVED_S
            self.refused_until_s = self.clock() + REFUSED_S
            raise _too_slow()


class GrammarPaces:
    """Those of the grammars that were asked for last. Owned by the model thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock``: of the wall, s."""
        self._clock = clock
        self._paces: OrderedDict[bytes, Pace] = OrderedDict()  # by their texts' digests

    def of(self, text: str) -> Pace:
        """To be kept by whoever follows an output of this grammar; up to 1 ms for a large one."""
        key = hashlib.blake2b(text.encode(), digest_size=16).digest()
        pace = self._paces.get(key)
        if pace is None:
            pace = self._paces[key] = Pace(self._clock)
            if len(self._paces) > _MAX_PACES:
                self._paces.popitem(last=False)
        self._paces.move_to_end(key)
        return pace


def _too_slow() -> InvalidRequestError:
    return InvalidRequestError(
        "takes too long to follow: it is ambiguous", field="sampling.constraint"
    )

"""What a session tells of its request, to whoever counts, traces and logs."""

import enum
from typing import Protocol

from opentelemetry.context import Context

from diptych.errors import DiptychError
from diptych.telemetry.stages import Stage
from router.placement.explanation import Explanation
from router.placement.placement import Forecast, Placement, Why
from router.placement.views import WorkerId
from router.request.actions import Retry


class Waits(enum.Enum):
    """What a request waits for."""

    ROOM = "room"  # no worker takes another one now
    TURN = "turn"  # others that wait go before it
    OBJECTIVES = "objectives"  # to be placed now would break some, its own or others'


class Observer(Protocol):
    """Follows one request on workers. Called on the event loop; costs next to nothing."""

    @property
    def attempt_context(self) -> Context:
        """What spans of pulls and of computing prompts hang under now."""
        ...

    @property
    def is_traced(self) -> bool:
        """Whether ``placed`` is to be told why."""
        ...

    def waits(self, why: Waits) -> None:
        """It has no placement yet, for that."""
        ...

    def foretold(self, forecast: Forecast) -> None:
        """Workers were chosen by this; what came true of it is worth knowing."""
        ...

    def placed(self, placement: Placement, why: Explanation) -> None:
        """Workers were chosen; they are asked next."""
        ...

    def prefill_asked(self, worker: WorkerId) -> Context:
        """A prefill worker is asked for a lease; what its spans hang under."""
        ...

    def decode_asked(self, worker: WorkerId) -> Context:
        """A decode worker is asked for blocks; what the span of its run would hang under."""
        ...

    def started(self) -> None:
        """The decode worker may run the sequence."""
        ...

    def retried(self, retry: Retry, cause: DiptychError, awaited: Stage) -> None:
        """An attempt failed for this, that was done instead, and this stage waits for it."""
        ...

    def ran_locally(self, why: Why) -> None:
        """A decode worker computes the KV itself."""
        ...

    def failed(self, cause: DiptychError) -> None:
        """There will be no answer."""
        ...

    def written(self, num_tokens: int, gap_s: float | None) -> None:
        """A response with so many tokens was written; ``gap_s`` since the one before, s."""
        ...

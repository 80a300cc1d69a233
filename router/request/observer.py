"""What a session tells of its request, to whoever counts, traces and logs."""

from typing import Protocol

from opentelemetry.context import Context

from diptych.errors import DiptychError
from router.placement.types import Why
from router.request.actions import Retry


class Observer(Protocol):
    """Follows one request on workers. Called on the event loop; costs next to nothing."""

    @property
    def context(self) -> Context:
        """Of the request's span, or of the client's: what workers' spans hang under."""
        ...

    def retried(self, retry: Retry, cause: DiptychError) -> None:
        """An attempt failed for this, and that was done instead."""
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

"""What a request wants of its service: its class and its objectives, declared once. Pure.

A field of :class:`ServiceLevel` is one of ``GenerateRequest`` in inference.proto, a member of a
body over HTTP, an argument of the client's ``build_request`` and a flag of ``diptych generate``,
each under the same name.
"""

from typing import Annotated, Final, NamedTuple

from pydantic import Field

from diptych.errors import InvalidRequestError
from diptych.request_class import RequestClass
from diptych.v1 import inference_pb2

MIN_OBJECTIVE_MS: Final = 0.001
MAX_OBJECTIVE_MS: Final = 86_400_000.0  # a day
ObjectiveMs = Annotated[float, Field(ge=MIN_OBJECTIVE_MS, le=MAX_OBJECTIVE_MS)]
"""One of a process's settings, which are held to the same range."""

LEVEL_HELP: Final = {
    "priority": "How urgent the request is beside others: realtime, standard or batch. Unset: as "
    "the key or the router says.",
    "ttft_ms": "The first token is wanted within so many milliseconds of the request's arrival. "
    "Unset: as the router says for its class.",
    "tpot_ms": "Tokens are wanted no further apart than so many milliseconds, on average. Unset: "
    "as the router says for its class.",
}


class ServiceLevel(NamedTuple):
    """What a client said of it; None: nothing."""

    priority: RequestClass | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def check(self) -> None:
        """Raise InvalidRequestError with the field that is out of its range."""
        for name, value in (("ttft_ms", self.ttft_ms), ("tpot_ms", self.tpot_ms)):
            if value is not None and not MIN_OBJECTIVE_MS <= value <= MAX_OBJECTIVE_MS:
                raise InvalidRequestError(
                    f"should be from {MIN_OBJECTIVE_MS:g} to {MAX_OBJECTIVE_MS:g}", field=name
                )

    def write_to(self, message: inference_pb2.GenerateRequest) -> None:
        """Say it in a request; what is None stays unset."""
        if self.priority is not None:
            message.priority = _ON_WIRE[self.priority]
        if self.ttft_ms is not None:
            message.ttft_ms = self.ttft_ms
        if self.tpot_ms is not None:
            message.tpot_ms = self.tpot_ms

    @classmethod
    def of(cls, message: inference_pb2.GenerateRequest) -> "ServiceLevel":
        """What a request says. Raises InvalidRequestError: it names a class that nobody knows."""
        priority = None
        if message.priority:
            priority = _FROM_WIRE.get(message.priority)
            if priority is None:
                raise InvalidRequestError(
                    f"should be one of {', '.join(RequestClass)}", field="priority"
                )
        return cls(
            priority,
            message.ttft_ms if message.HasField("ttft_ms") else None,
            message.tpot_ms if message.HasField("tpot_ms") else None,
        )


NO_LEVEL: Final = ServiceLevel()

_ON_WIRE: Final = {
    RequestClass.REALTIME: inference_pb2.PRIORITY_REALTIME,
    RequestClass.STANDARD: inference_pb2.PRIORITY_STANDARD,
    RequestClass.BATCH: inference_pb2.PRIORITY_BATCH,
}
_FROM_WIRE: Final = {value: name for name, value in _ON_WIRE.items()}

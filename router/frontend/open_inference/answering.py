"""One inference request, from its bytes to its responses."""

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import NamedTuple

from diptych.errors import DiptychError, InvalidRequestError
from diptych.open_inference import service_pb2
from diptych.tenant import NOBODY
from router.frontend.admission import Admission
from router.frontend.callers.callers import Callers
from router.frontend.field_names import renamed
from router.frontend.generator import Generator
from router.frontend.grpc_call import Call, read_message
from router.frontend.handed_over import HandedOver
from router.frontend.open_inference.answers import Answer, StreamedAnswer, WholeAnswer, check_size
from router.frontend.open_inference.asked import Asked, read_request
from router.frontend.open_inference.tensors import STREAM


class Front(NamedTuple):
    """What requests are answered with."""

    admission: Admission
    generator: Generator
    callers: Callers
    max_request_bytes: int
    """More are refused without being parsed."""


class Answering:
    """Belongs to the task that iterates over its responses."""

    def __init__(
        self, front: Front, data: bytes, call: Call, handed: HandedOver | None = None
    ) -> None:
        """``handed``: there can be one response alone, which has to be admitted there."""
        self._front = front
        self._data = data
        self._call = call
        self._handed = handed
        self.tenant = NOBODY  # until it is known
        self.given_id = ""

    async def responses(
        self, give_up: Callable[[], None]
    ) -> AsyncGenerator[service_pb2.ModelInferResponse, None]:
        """The answer; see :meth:`router.frontend.generator.Generator.generate`.

        Raises DiptychError.
        """
        try:
            asked = await self._read()
        except DiptychError as error:
            self._front.generator.refused(
                error.reason, self._call.metadata, request_id=self.given_id, tenant=self.tenant
            )
            raise
        answer = self._answer_to(asked)
        events = self._front.generator.generate(
            asked.request,
            deadline_s=self._deadline_s(asked),
            metadata=self._call.metadata,
            give_up=give_up,
        )
        async with aclosing(events):
            try:
                async for event in events:
                    response = answer.send(event)
                    if response is not None:
                        yield response
            except InvalidRequestError as error:
                raise renamed(error, asked.names) from None

    async def _read(self) -> Asked:
        self.tenant = await self._call.tenant(self._front.callers)
        num_bytes = len(self._data)
        message = read_message(
            service_pb2.ModelInferRequest, self._data, self._front.max_request_bytes
        )
        self._data = b""  # what was read is kept, and nothing else
        self.given_id = message.id
        if self._handed is not None:
            self._handed.admit(self.tenant.name)
        asked = read_request(
            message,
            num_bytes=num_bytes,
            max_model_len=self._front.admission.max_model_len,
            tenant=self.tenant,
        )
        if self._handed is not None and asked.is_stream:
            raise InvalidRequestError("is only for ModelStreamInfer", field=STREAM)
        check_size(asked)
        return asked

    def _answer_to(self, asked: Asked) -> Answer:
        model = self._front.admission.model
        text = model.tokenizer.text
        if asked.is_stream:
            return StreamedAnswer(asked, model.name, text)
        return WholeAnswer(asked, model.name, text, is_marked=self._handed is None)

    def _deadline_s(self, asked: Asked) -> float | None:
        """The call's, or the request's own, whichever comes first."""
        if asked.timeout_s is None:
            return self._call.deadline_s
        own_s = time.monotonic() + asked.timeout_s
        return own_s if self._call.deadline_s is None else min(own_s, self._call.deadline_s)

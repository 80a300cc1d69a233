"""The service GRPCInferenceService: what clients of Triton call, on the router's front door."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Final, TypeVar

import grpc
from google.protobuf.message import Message

from diptych.errors import ModelNotFoundError, NotServedError
from diptych.open_inference import service_pb2
from diptych.rpc.server import Context
from router.frontend.grpc_call import Call, hand_over, read_message
from router.frontend.handed_over import HandedOver
from router.frontend.open_inference import description
from router.frontend.open_inference.answering import Answering, Front
from router.frontend.open_inference.asked import VERSION, check_version
from router.frontend.open_inference.open_streams import OpenStreams
from router.frontend.open_inference.stream import InferStream

SERVICE = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name

INFERRING: Final = frozenset(f"/{SERVICE}/{name}" for name in ("ModelInfer", "ModelStreamInfer"))
"""The methods that generate."""

_REPOSITORY: Final = "workers load their model as they start"
_SHARED_MEMORY: Final = "tensors come and go with the messages"
_SETTINGS: Final = "the router has settings for it"
# What clients of Triton may call beside, and why it is not here.
_UNSERVED: Final = {
    "ModelStatistics": "the router's metrics tell it",
    "RepositoryIndex": _REPOSITORY,
    "RepositoryModelLoad": _REPOSITORY,
    "RepositoryModelUnload": _REPOSITORY,
    "SystemSharedMemoryStatus": _SHARED_MEMORY,
    "SystemSharedMemoryRegister": _SHARED_MEMORY,
    "SystemSharedMemoryUnregister": _SHARED_MEMORY,
    "CudaSharedMemoryStatus": _SHARED_MEMORY,
    "CudaSharedMemoryRegister": _SHARED_MEMORY,
    "CudaSharedMemoryUnregister": _SHARED_MEMORY,
    "TraceSetting": _SETTINGS,
    "LogSettings": _SETTINGS,
}
_STRICT_ERRORS: Final = ("triton_grpc_error", "true")  # metadata: a failure ends the stream

M = TypeVar("M", bound=Message)


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _nothing() -> None:
    """There is no write to give up."""


class OpenInferenceServicer:
    """GRPCInferenceService: one handler task per call, and one per request of a stream."""

    def __init__(
        self,
        front: Front,
        *,
        max_streams: int,
        write_s: float,
        handed: HandedOver,
    ) -> None:
        """``max_streams`` may be open at a time, as one that asks nothing costs a call all the
        same; ``write_s`` is how long a client may take to hear of a failure. ``handed`` bounds
        answers that wait in gRPC.
        """
        self._handed = handed
        self._front = front
        self._streams = OpenStreams(max_streams)
        self._write_s = write_s

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve the methods, and refuse by name those that clients may look for.

        They get their requests as bytes, so that an oversized one costs nothing.
        """
        unary: dict[str, Callable[[bytes, Context], Awaitable[Message]]] = {
            "ServerLive": self.ServerLive,
            "ServerReady": self.ServerReady,
            "ModelReady": self.ModelReady,
            "ServerMetadata": self.ServerMetadata,
            "ModelMetadata": self.ModelMetadata,
            "ModelConfig": self.ModelConfig,
            "ModelInfer": self.ModelInfer,
            **{name: self._refusing(name, why) for name, why in _UNSERVED.items()},
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(method, response_serializer=_serialize)
            for name, method in unary.items()
        }
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self.ModelStreamInfer, response_serializer=_serialize
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    async def ServerLive(self, request: bytes, context: Context) -> service_pb2.ServerLiveResponse:
        """See service.proto; so the next ones."""
        await self._check_caller(context)
        return service_pb2.ServerLiveResponse(live=True)

    async def ServerReady(
        self, request: bytes, context: Context
    ) -> service_pb2.ServerReadyResponse:
        await self._check_caller(context)
        return service_pb2.ServerReadyResponse(ready=self._front.admission.is_ready)

    async def ModelReady(self, request: bytes, context: Context) -> service_pb2.ModelReadyResponse:
        await self._check_caller(context)
        asked = self._read(service_pb2.ModelReadyRequest, request)
        is_here = asked.name == self._model and asked.version in ("", VERSION)
        return service_pb2.ModelReadyResponse(ready=is_here and self._front.admission.is_ready)

    async def ServerMetadata(
        self, request: bytes, context: Context
    ) -> service_pb2.ServerMetadataResponse:
        await self._check_caller(context)
        return description.server_metadata()

    async def ModelMetadata(
        self, request: bytes, context: Context
    ) -> service_pb2.ModelMetadataResponse:
        await self._check_caller(context)
        asked = self._read(service_pb2.ModelMetadataRequest, request)
        self._check_model(asked.name, asked.version)
        return description.model_metadata(self._model)

    async def ModelConfig(
        self, request: bytes, context: Context
    ) -> service_pb2.ModelConfigResponse:
        await self._check_caller(context)
        asked = self._read(service_pb2.ModelConfigRequest, request)
        self._check_model(asked.name, asked.version)
        return description.model_config(self._model)

    async def ModelInfer(self, request: bytes, context: Context) -> service_pb2.ModelInferResponse:
        call = Call.of(context)
        answering = Answering(self._front, request, call, self._handed)
        async with aclosing(answering.responses(_nothing)) as responses:
            (whole,) = [response async for response in responses]
        return hand_over(whole, context, answering.tenant, self._handed)

    async def ModelStreamInfer(self, requests: AsyncIterator[bytes], context: Context) -> None:
        call = Call.of(context)
        tenant = await call.tenant(self._front.callers)
        stream = InferStream(
            context,
            lambda data: Answering(self._front, data, call),
            write_s=self._write_s,
            ends_on_failure=_STRICT_ERRORS in call.metadata,
        )
        with self._streams.place(stream, tenant):
            await stream.run(requests)

    @property
    def _model(self) -> str:
        return self._front.admission.model.name

    async def _check_caller(self, context: Context) -> None:
        """Raise InvalidApiKeyError for whom nobody knows."""
        await Call.of(context).tenant(self._front.callers)

    def _read(self, message_type: type[M], data: bytes) -> M:
        return read_message(message_type, data, self._front.max_request_bytes)

    def _check_model(self, name: str, version: str) -> None:
        if name != self._model:
            raise ModelNotFoundError(f"no model {name[:128]!r} here; there is {self._model!r}")
        check_version(version)

    def _refusing(self, name: str, why: str) -> Callable[[bytes, Context], Awaitable[Message]]:
        async def refuse(request: bytes, context: Context) -> Message:
            await self._check_caller(context)
            raise NotServedError(f"{name} is not served: {why}")

        return refuse

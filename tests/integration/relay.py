"""A router that dies when a test says so: a real server in front of a real router."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from diptych.errors import DiptychError
from diptych.rpc.channel import open_channel
from diptych.rpc.server import Context, make_server
from diptych.v1 import inference_pb2, inference_pb2_grpc
from router.frontend.grpc import SERVICE


class Relay:
    """Passes requests and answers on; ``requests`` and ``written`` say which.

    ``refusals`` are raised first, one for each request.
    """

    def __init__(
        self, router: "inference_pb2_grpc.InferenceAsyncStub", num_messages: int | None
    ) -> None:
        self.address = ""
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.written: list[inference_pb2.GenerateResponse] = []
        self.refusals: list[DiptychError] = []
        self.is_over = asyncio.Event()
        self._router = router
        self._num_messages = num_messages

    async def generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.requests.append(request)
        if self.refusals:
            raise self.refusals.pop(0)
        async for response in self._router.Generate(request):
            if len(self.written) == self._num_messages:
                self.is_over.set()
                await asyncio.Event().wait()
            await context.write(response)
            self.written.append(response)
        return
        yield

    def token_ids(self) -> list[int]:
        """Those that were passed on."""
        return [token_id for each in self.written for token_id in each.delta.token_ids]


@asynccontextmanager
async def relaying(
    router: str, num_messages: int | None = None, *, listen: str = "127.0.0.1:0"
) -> AsyncIterator[Relay]:
    """A relay to the router at this address.

    After ``num_messages`` of an answer it stops without grace, and nobody listens there any more.
    """
    async with open_channel(router) as channel, asyncio.TaskGroup() as tasks:
        relay, server = (
            Relay(inference_pb2_grpc.InferenceStub(channel), num_messages),
            make_server(),
        )
        handler = grpc.unary_stream_rpc_method_handler(
            relay.generate,
            request_deserializer=inference_pb2.GenerateRequest.FromString,
            response_serializer=inference_pb2.GenerateResponse.SerializeToString,
        )
        methods = grpc.method_handlers_generic_handler(SERVICE, {"Generate": handler})
        server.add_generic_rpc_handlers((methods,))
        relay.address = f"127.0.0.1:{server.add_insecure_port(listen)}"
        await server.start()

        async def stop() -> None:
            await relay.is_over.wait()
            await server.stop(None)

        stopping = tasks.create_task(stop())
        try:
            yield relay
        finally:
            relay.is_over.set()
            await stopping

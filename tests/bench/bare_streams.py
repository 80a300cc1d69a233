"""Servers that send what a router would, and do nothing else: what a router is measured beside.

    python -m tests.bench.bare_streams grpc|sse

prints its port and serves until it is killed. Every token is sent at a multiple of the step's
time, as those of a batch are, and says by the system's monotonic clock when that was: in the
Delta's position, or in the event's ``created``.
"""

import argparse
import asyncio
import socket
import time
from collections.abc import AsyncIterator
from typing import Final

import grpc
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from diptych.rpc.server import Context
from diptych.v1 import inference_pb2
from router.frontend.grpc import SERVICE

STEP_S: Final = 0.05
COMPLETIONS: Final = "/v1/completions"
_TICKS_PER_S: Final = 100_000
_ROUND: Final = 10**9  # ticks until a stamp begins anew: hours
_EVENT: Final = (
    'data: {"id":"cmpl-%s","object":"text_completion","created":%010d,"model":"model",'
    '"choices":[{"index":0,"text":"a","logprobs":null,"finish_reason":null,"stop_reason":null}]}'
    "\n\n"
)


def stamp(moment_s: float) -> int:
    """A moment of the monotonic clock, in a few digits."""
    return int(moment_s * _TICKS_PER_S) % _ROUND


def seconds_since(stamped: int) -> float:
    """How long ago that was, s; a timer may be a tick early."""
    num_ticks = (stamp(time.monotonic()) - stamped + _ROUND // 2) % _ROUND - _ROUND // 2
    return num_ticks / _TICKS_PER_S


async def next_step(step_s: float = STEP_S) -> float:
    """Wait for the step that all sequences take together; when it was due, s."""
    now = time.monotonic()
    due_s = now - now % step_s + step_s
    await asyncio.sleep(due_s - now)
    return due_s


async def generate(
    request: inference_pb2.GenerateRequest, context: Context
) -> AsyncIterator[inference_pb2.GenerateResponse]:
    """Deltas of one token."""
    for _ in range(request.sampling.max_tokens):
        due_s = await next_step()
        delta = inference_pb2.Delta(text="a", token_ids=[66], position=stamp(due_s))
        await context.write(inference_pb2.GenerateResponse(delta=delta))
    return
    yield  # a generator without items, as the router's is


async def serve_grpc() -> None:
    """Serve until killed; prints the port."""
    server = grpc.aio.server()
    handler = grpc.unary_stream_rpc_method_handler(
        generate,
        request_deserializer=inference_pb2.GenerateRequest.FromString,
        response_serializer=inference_pb2.GenerateResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {"Generate": handler}),)
    )
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)  # noqa: T201
    await server.start()
    await server.wait_for_termination()


async def complete(request: Request) -> StreamingResponse:
    """Events of one token."""
    body = await request.json()
    events = _events(request.headers["x-request-id"], body["max_tokens"])
    return StreamingResponse(events, media_type="text/event-stream")


async def _events(request_id: str, num_tokens: int) -> AsyncIterator[str]:
    for _ in range(num_tokens):
        due_s = await next_step()
        yield _EVENT % (request_id, stamp(due_s))
    yield "data: [DONE]\n\n"


async def serve_sse() -> None:
    """The same with Starlette, in a uvicorn that is set up as the router's."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(listener.getsockname()[1], flush=True)  # noqa: T201
    config = uvicorn.Config(
        Starlette(routes=[Route(COMPLETIONS, complete, methods=["POST"])]),
        http="httptools",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
    )
    await uvicorn.Server(config).serve(sockets=[listener])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("grpc", "sse"))
    serve = serve_grpc if parser.parse_args().kind == "grpc" else serve_sse
    uvloop.run(serve())  # as the router


if __name__ == "__main__":
    main()

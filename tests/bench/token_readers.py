"""Clients that count the tokens of a stream as they come, and do little else."""

import asyncio
import json
import re
from collections.abc import Callable
from typing import Final

import grpc

from diptych.v1 import inference_pb2_grpc
from tests.bench.bare_streams import COMPLETIONS
from tests.call import token_request

TokensCame = Callable[[int, int], None]
"""Told how many tokens a message brought, and what a bare server stamped it with."""

PROMPT: Final = range(30, 40)  # no whole block: nothing of it is looked for in caches
_PIECE: Final = re.compile(rb'"created":(\d+).*?"text":"(\w*)"')
_END: Final = b"data: [DONE]\n\n"


async def read_grpc(
    channel: grpc.aio.Channel, request_id: str, num_tokens: int, came: TokensCame
) -> None:
    """Take one answer whole."""
    request = token_request(PROMPT, max_tokens=num_tokens, request_id=request_id)
    request.sampling.return_margins = False
    async for response in inference_pb2_grpc.InferenceStub(channel).Generate(request):
        if response.HasField("delta"):
            came(len(response.delta.token_ids), response.delta.position)


async def read_sse(port: int, request_id: str, num_tokens: int, came: TokensCame) -> None:
    """The same over HTTP, on a connection of its own. Raises ConnectionError: it broke off."""
    reader = _SseReader(came)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_connection(lambda: reader, "127.0.0.1", port)
    try:
        transport.write(completion_request(request_id, num_tokens))
        await reader.ended
    finally:
        transport.close()


def completion_request(request_id: str, num_tokens: int) -> bytes:
    """A request for a stream of so many tokens, as it goes over the wire."""
    body = {"model": "model", "prompt": list(PROMPT), "max_tokens": num_tokens, "stream": True}
    content = json.dumps({**body, "temperature": 0, "ignore_eos": True}).encode()
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"x-request-id: {request_id}\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


class _SseReader(asyncio.Protocol):
    """Each piece of a completion is letters alone, one for each token."""

    def __init__(self, came: TokensCame) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._came = came
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        whole, end, self._rest = (self._rest + data).rpartition(b"\n\n")
        for created, text in _PIECE.findall(whole):
            self._came(len(text), int(created))
        if (whole + end).endswith(_END) and not self.ended.done():
            self.ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio.Protocol."""
        if not self.ended.done():
            self.ended.set_exception(error or ConnectionResetError("the stream broke off"))

"""An answer that is shown while it comes."""

from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import TypeAlias

from diptych.client import Chunk, DiptychClient
from diptych.v1 import inference_pb2

Write = Callable[[str], None]
WriteCall = Callable[[inference_pb2.ToolCall], None]
Metadata: TypeAlias = Sequence[tuple[str, str]]


async def show_answer(
    client: DiptychClient,
    request: inference_pb2.GenerateRequest,
    write: Write,
    timeout_s: float | None,
    metadata: Metadata = (),
    write_call: WriteCall = lambda call: None,
) -> Chunk:
    """``write`` each text as it comes, ``write_call`` each call of a tool; the last chunk (usage,
    timing). Raises DiptychError."""
    last = None
    async with aclosing(client.stream(request, timeout_s, metadata)) as chunks:
        async for chunk in chunks:
            write(chunk.text)
            for call in chunk.tool_calls:
                write_call(call)
            last = chunk
    assert last is not None, "a stream ends with a chunk, or an error"
    return last

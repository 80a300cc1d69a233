"""An answer that is shown while it comes."""

import sys
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Final, TypeAlias

from diptych.client import Chunk, DiptychClient
from diptych.v1 import inference_pb2

Write = Callable[[str], None]
WriteCall = Callable[[inference_pb2.ToolCall], None]
Metadata: TypeAlias = Sequence[tuple[str, str]]

# What terminals obey: all control characters but the end of a line, a tab, and what only comes
# before such an end.
_OBEYED: Final = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
_HARMLESS: Final = {**_OBEYED, ord("\n"): "\n", ord("\t"): "\t", ord("\r"): ""}


def write_text(text: str) -> None:
    """To standard output, as it is; but no model writes to a terminal what that would obey."""
    sys.stdout.write(text.translate(_HARMLESS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def write_thought(text: str) -> None:
    """To standard error, so that what follows it is all that a pipe gets; a terminal dims it."""
    is_seen = sys.stderr.isatty()
    sys.stderr.write(f"\x1b[2m{text.translate(_HARMLESS)}\x1b[0m" if is_seen else text)
    sys.stderr.flush()


async def show_answer(
    client: DiptychClient,
    request: inference_pb2.GenerateRequest,
    write: Write,
    timeout_s: float | None,
    metadata: Metadata = (),
    write_call: WriteCall = lambda call: None,
    write_thought: Write = write_thought,
) -> Chunk:
    """``write`` each text as it comes, ``write_call`` each call of a tool, ``write_thought`` what
    the model thinks; the last chunk (usage, timing). Raises DiptychError."""
    last, is_thinking = None, False
    async with aclosing(client.stream(request, timeout_s, metadata)) as chunks:
        async for chunk in chunks:
            if chunk.reasoning:
                write_thought(chunk.reasoning)
            elif is_thinking:
                write_thought("\n")
            is_thinking = bool(chunk.reasoning)
            write(chunk.text)
            for call in chunk.tool_calls:
                write_call(call)
            last = chunk
    assert last is not None, "a stream ends with a chunk, or an error"
    return last

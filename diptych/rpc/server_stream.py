"""What the server of a long stream does at its end."""

import asyncio
import contextlib

import grpc
from google.protobuf.message import Message

from diptych.rpc.server import Context


async def last_word(context: Context, message: Message, within_s: float) -> None:
    """Send ``message``, why a stream is about to end, and wait for the peer to cancel it.

    The status that follows says the same, but gRPC loses a status that meets a message of
    the peer's on its way. Nothing may be on its way out. Returns after ``within_s`` at the
    latest; a cancel ends the handler itself before.
    """
    with contextlib.suppress(TimeoutError, grpc.aio.BaseError):
        async with asyncio.timeout(within_s):
            await context.write(message)
            await asyncio.Event().wait()

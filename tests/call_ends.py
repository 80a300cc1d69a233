"""Calls whose requests are a stream end by their peer's word, whatever became of our writes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from diptych.rpc.call_end import CallEnd


@asynccontextmanager
async def told(end: CallEnd) -> AsyncIterator[None]:
    """What the block raises as its call ends is what the peer said; nothing, if it said OK."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        said = await end.error(error)
        if said is not None:
            raise said from None

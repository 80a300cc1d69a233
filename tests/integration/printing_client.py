"""A client that may be killed: it asks what its first line says, and prints each chunk at once.

The line is JSON: a router's address, and requests as base64. A line that is printed has the
number of the request, its seed, new token ids, and text.
"""

import asyncio
import base64
import json
import sys
from collections.abc import Sequence

from diptych.client import DiptychClient
from diptych.v1 import inference_pb2


def asking(address: str, requests: Sequence[inference_pb2.GenerateRequest]) -> bytes:
    """The line that has the client ask for these."""
    written = [base64.b64encode(each.SerializeToString()).decode() for each in requests]
    return json.dumps([address, written]).encode() + b"\n"


async def main() -> None:
    """Ask all at once, until all have ended or somebody kills it."""
    address, written = json.loads(sys.stdin.readline())
    async with DiptychClient(address) as client, asyncio.TaskGroup() as tasks:
        for number, each in enumerate(written):
            request = inference_pb2.GenerateRequest.FromString(base64.b64decode(each))
            tasks.create_task(_print(client, number, request))


async def _print(
    client: DiptychClient, number: int, request: inference_pb2.GenerateRequest
) -> None:
    async for chunk in client.stream(request, timeout_s=60):
        line = json.dumps([number, chunk.seed, chunk.token_ids, chunk.text])
        print(line, flush=True)  # noqa: T201 - its output


if __name__ == "__main__":
    asyncio.run(main())

"""Whatever bytes the Batches service gets, it answers with a type, and files stay as they were.

Ten thousand messages with ``--hypothesis-profile long``.
"""

import logging
import random
from collections import Counter
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import settings

from batch_server.rpc.servicer import SERVICE
from diptych.errors import all_reasons
from diptych.rpc.call_end import CallEnd
from diptych.rpc.channel import open_channel
from diptych.rpc.status import from_rpc_error
from diptych.v1 import batches_pb2 as public
from tests.call_ends import told
from tests.integration.batch_rig import UPLOADS, content, sent, served, written
from tests.integration.odd_messages import odd_bytes
from tests.notes import Note
from tests.unit.batch_server.rig import CHAT, line

IS_LONG = settings.get_current_profile_name() == "long"
NUM_MESSAGES = 10_000 if IS_LONG else 150
NEIGHBOUR_EACH = 20
DATA = line("a", "one") + line("b", "two")
STREAMS: Final = ("ReadFile", "WatchBatch")
ALLOWED: Final = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
OURS: Final = ("router", "diptych", "batch_server")  # loggers: what crashes is told of there


async def test_every_message_gets_a_typed_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, note: Note
) -> None:
    seen: Counter[str] = Counter()
    uploads = UPLOADS._replace(max_tenant_bytes=10**9)
    async with (
        served(tmp_path, uploads=uploads) as at,
        at.client() as client,
        open_channel(at.address) as channel,
    ):
        kept = await client.upload(written(tmp_path, DATA))
        batch = (await client.create(kept, CHAT)).batch_id
        good = good_messages(kept, batch)
        with caplog.at_level(logging.ERROR):
            for turn in range(NUM_MESSAGES):
                rng = random.Random(turn)
                method, message = rng.choice(good)
                try:
                    await ask(channel, method, [odd_bytes(rng, each) for each in message])
                    seen["OK"] += 1
                except grpc.RpcError as error:
                    told = from_rpc_error(error)
                    assert told.code in ALLOWED, f"message {turn}: {method}: {told}"
                    assert told.reason in all_reasons(), f"message {turn}: {method}: {told.reason}"
                    seen[told.reason] += 1
                if turn % NEIGHBOUR_EACH == 0:
                    assert await content(client, kept) == DATA
    ours = [each for each in caplog.records if each.name.startswith(OURS)]
    assert not ours, [vars(record) for record in ours]
    note(f"{seen.total()} calls of the batch server: {dict(sorted(seen.items()))}")
    assert seen["OK"] > NUM_MESSAGES // 20
    assert seen["REQUEST_INVALID"] > NUM_MESSAGES // 20


def good_messages(file_id: str, batch_id: str) -> list[tuple[str, list[Message]]]:
    """Of each method one; none ends what others look at."""
    asked = public.CreateBatchRequest(
        input_file_id=file_id, endpoint=CHAT, completion_window="1h", metadata={"a": "b"}
    )
    return [
        ("UploadFile", [*sent(public.NewFile(filename="x", num_bytes=4), b"ab", b"cd")]),
        ("ReadFile", [public.ReadFileRequest(id=file_id)]),
        ("DeleteFile", [public.DeleteFileRequest(id="file-none")]),
        ("CreateBatch", [asked]),
        ("GetBatch", [public.GetBatchRequest(id=batch_id)]),
        ("ListBatches", [public.ListBatchesRequest(limit=2, after=batch_id)]),
        ("CancelBatch", [public.CancelBatchRequest(id=batch_id)]),
        ("WatchBatch", [public.WatchBatchRequest(id=batch_id)]),
    ]


async def ask(channel: grpc.aio.Channel, method: str, messages: list[bytes]) -> None:
    """Raises grpc.RpcError."""
    path = f"/{SERVICE}/{method}"
    untyped: Any = channel
    if method == "UploadFile":
        call = untyped.stream_unary(path)(iter(messages))
        async with told(CallEnd(call)):
            await call
    elif method in STREAMS:
        async for _ in untyped.unary_stream(path)(messages[0]):
            pass
    else:
        await untyped.unary_unary(path)(messages[0])

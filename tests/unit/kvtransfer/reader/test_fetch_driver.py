"""How a pull names the end of its stream."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from diptych.timers import Timers
from diptych.v1 import decode_pb2, kv_source_pb2
from kvtransfer.memory import HostMemory
from kvtransfer.reader.fetch_driver import Pull, PullPlan
from kvtransfer.reader.proven_link import Link
from kvtransfer.reader.pull_machine import PullError
from kvtransfer.reader.quarantine import Quarantine


class Call:
    """A Fetch stream that reads as ``last``."""

    def __init__(self, last: object) -> None:
        self.last = last

    async def write(self, command: kv_source_pb2.FetchCommand) -> None: ...

    async def read(self) -> object:
        return self.last


@pytest.mark.parametrize(
    ("last", "why"),
    [
        (None, "a message of the source cannot be read"),
        (object(), "the source ended the stream"),  # gRPC's word for the end
    ],
)
async def test_what_cannot_be_read_is_told_from_an_end(last: object, why: str) -> None:
    plan = PullPlan(
        open=kv_source_pb2.FetchOpen(), end_token=16, prompt_digest=b"", local_block_ids=(0,)
    )
    link = Link(cast(Any, None), "nixl", cast(Any, None), lambda: None)
    endpoint = SimpleNamespace(thread=None, memory=HostMemory(bytearray(16), 16))
    quarantine = Quarantine(lambda _: None, lambda _: None)
    pull = Pull(plan, link, cast(Any, endpoint), quarantine, Timers())
    with pytest.raises(PullError, match=why) as caught:
        await pull._receive(cast(Any, Call(last)))
    assert caught.value.failure == decode_pb2.PULL_FAILURE_SOURCE_LOST

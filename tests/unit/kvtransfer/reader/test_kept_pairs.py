"""A pair is kept proven: again when its channel broke, never again where it does not fit."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from diptych.v1 import worker_pb2
from kvtransfer.reader.pair_machine import PairState
from tests.unit.kvtransfer.reader.test_pair import RANKED, Pair, Source

READY, BROKEN = grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE


class Channel:
    """It is ready until it breaks."""

    def __init__(self) -> None:
        self._state = READY
        self._changed = asyncio.Event()

    def becomes(self, state: grpc.ChannelConnectivity) -> None:
        self._state = state
        self._changed.set()

    def get_state(self) -> grpc.ChannelConnectivity:
        return self._state

    async def wait_for_state_change(self, last: grpc.ChannelConnectivity) -> None:
        while self._state is last:
            self._changed.clear()
            await self._changed.wait()

    async def close(self, grace: float | None) -> None: ...


class DialledPair(Pair):
    """Its source can be dialled, and is asked past gRPC."""

    def __init__(self, source: Source) -> None:
        super().__init__(source, reprove_s=60)
        self.channel = Channel()

    def _dial(self, address: str, role: str) -> object:
        self.num_dialled += 1
        return self.channel

    @asynccontextmanager
    async def kept(self, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
        monkeypatch.setattr("kvtransfer.reader.pair.LinkProver", lambda *given: self._source)
        async with asyncio.timeout(2), asyncio.TaskGroup() as tasks:
            task = tasks.create_task(self.keep())
            yield
            task.cancel()


async def test_a_pair_of_another_layout_is_refused_and_never_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = Source(offered={"pigeon"}, good=set())
    pair = DialledPair(source)
    async with pair.kept(monkeypatch):
        while not pair.num_changes:
            await asyncio.sleep(0)
        assert pair._machine.state is PairState.REFUSED
        assert pair.to_proto().state == worker_pb2.PAIR_STATE_FAILED
        assert "pigeon" in pair.message
        await asyncio.sleep(0.01)  # others that failed are tried after 0.001 s
        assert (pair.num_dialled, source.num_asked, pair.num_changes) == (1, 1, 1)


async def test_a_pair_whose_channel_broke_is_proven_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then its link is closed, and pulls wait."""
    source = Source(offered=set(RANKED), good=set(RANKED))
    pair = DialledPair(source)
    seen: list[tuple[worker_pb2.PairState, list[str], str]] = []

    def look() -> None:
        pair.channel.becomes(READY)
        seen.append((pair.to_proto().state, list(source.closed), pair.message))

    async with pair.kept(monkeypatch):
        while pair.link is None:
            await asyncio.sleep(0)
        first = pair.link
        source.before_proof = look
        pair.channel.becomes(BROKEN)
        while pair.link in {None, first}:
            await asyncio.sleep(0)
        assert seen == [(worker_pb2.PAIR_STATE_CONNECTING, ["nixl"], "the connection broke")]

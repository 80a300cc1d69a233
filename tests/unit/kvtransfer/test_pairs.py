"""Which pairs are kept, over a stand-in for the connection."""

import asyncio

import pytest

from diptych.timers import Timers
from diptych.v1 import common_pb2
from kvtransfer.config import TransferConfig
from kvtransfer.endpoint import TransferEndpoint
from kvtransfer.memory import HostMemory
from kvtransfer.pair import SourcePair
from kvtransfer.pairs import PairTable, PeerKey


class NoScratch:
    def allocate(self, num_blocks: int) -> list[int]:
        raise AssertionError("nothing is probed")

    def free(self, block_ids: object) -> None: ...


async def test_a_source_named_again_at_once_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[SourcePair] = []

    async def keep(self: SourcePair) -> None:
        kept.append(self)
        try:
            await asyncio.Event().wait()
        finally:
            kept.remove(self)

    monkeypatch.setattr(SourcePair, "keep", keep)
    memory = HostMemory(bytearray(64), 16)
    table = PairTable(
        TransferEndpoint(TransferConfig(), "reader", common_pb2.KVLayout(), memory),
        scratch=NoScratch(),
        timers=Timers(),
        on_change=lambda: None,
        on_quarantine=lambda _: None,
        on_quarantine_end=lambda _: None,
    )
    source = PeerKey("127.0.0.1:1", "source")
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(table.run())
        table.set_peers("a", [source])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        (before,) = kept
        table.set_peers("a", [])  # the router left,
        table.set_peers("b", [source])  # and another one came, before anything else ran
        for _ in range(5):
            await asyncio.sleep(0)
        (after,) = kept
        assert after is not before
        running.cancel()
    assert not kept

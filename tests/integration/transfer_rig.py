"""A source and a reader of KV blocks over real gRPC, with plain bytes for a pool."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from diptych.engine.kv.shared_bytes import SharedBytes
from diptych.rpc.peer_channel import Dialer
from diptych.rpc.server import make_server
from diptych.timers import Timers
from diptych.v1 import common_pb2, worker_pb2
from diptych.v1 import kv_source_pb2_grpc as pb_grpc
from diptych.word_sums import ALGORITHM
from diptych.worker.scratch import PoolScratch
from kvtransfer.config import TransferConfig
from kvtransfer.endpoint import TransferEndpoint
from kvtransfer.memory import HostMemory, PoolMemory
from kvtransfer.rank_pools import RankPools
from kvtransfer.reader.pairs import LinkInterceptor, PairTable, PeerKey
from kvtransfer.reader.pull_machine import PullError, PullRequest
from kvtransfer.source.lease_table import LeaseTable
from kvtransfer.source.servicer import KVSourceServicer
from kvtransfer.transports.base import Transport
from kvtransfer.transports.child import ChildTransport
from kvtransfer.transports.rank_transports import RankTransports
from tests.waiting import until, within

BLOCK_SIZE = 16
BLOCKS = [3, 9, 4, 5, 20]  # at the source
LOCAL = [10, 11, 12, 1, 0]  # their places at the reader
NUM_TOKENS = 4 * BLOCK_SIZE + 3
NUM_SCRATCH = 8  # the last blocks of each memory, for probes
TIMERS = Timers(heartbeat_s=0.1, lost_peer_s=0.8, read_progress_s=2.0, confirm_s=1.0)
# For pulls that wait until an agent's process has started anew, however long the machine takes.
PATIENT = TIMERS.model_copy(update={"read_progress_s": 20.0})
AGENT_ANSWER_S = 30.0  # an agent that is only slow is not ended here


def layout(block_bytes: int, digest_level: str = "full") -> common_pb2.KVLayout:
    return common_pb2.KVLayout(
        format_version=2,
        model_digest="m",
        dtype="float32",
        block_size=BLOCK_SIZE,
        num_layers=2,
        num_kv_heads=2,
        head_dim=8,
        tensor_parallel_size=1,
        block_bytes=block_bytes,
        digest_level=digest_level,
        digest_algorithm=ALGORITHM,
    )


def config(transport: str, **settings: object) -> TransferConfig:
    given: dict[str, object] = {
        "transports": (transport,),
        "reconnect_min_s": 0.05,
        "reconnect_max_s": 0.2,
        "agent_answer_s": AGENT_ANSWER_S,
    }
    return TransferConfig.model_validate({**given, **settings})


@dataclass
class Source:
    endpoint: TransferEndpoint
    leases: LeaseTable
    servicer: KVSourceServicer
    memory: PoolMemory | RankPools
    address: str
    generations: dict[int, int]
    scratch: PoolScratch

    @property
    def key(self) -> PeerKey:
        return PeerKey(self.address, self.endpoint.incarnation)

    def fill(self, block_ids: Sequence[int]) -> bytes:
        """Random content; returns it concatenated."""
        self.memory.write(block_ids, 0, os.urandom(len(block_ids) * self.memory.block_bytes))
        return self.content(block_ids)

    def content(self, block_ids: Sequence[int]) -> bytes:
        return self.memory.read(block_ids, 0, len(block_ids) * self.memory.block_bytes)

    def lease(
        self,
        lease_id: str,
        block_ids: Sequence[int],
        num_tokens: int,
        reader: str,
        prompt_digest: bytes = b"",
    ) -> bytes:
        """Open and grant; returns the ticket."""
        ticket = os.urandom(16)
        self.leases.open(lease_id, block_ids, num_tokens, prompt_digest)
        self.leases.grant(lease_id, ticket, reader)
        return ticket


@dataclass
class Reader:
    endpoint: TransferEndpoint
    pairs: PairTable
    memory: PoolMemory | RankPools
    scratch: PoolScratch
    quarantined: set[int] = field(default_factory=set)
    num_quarantined: int = 0

    def content(self, block_ids: Sequence[int]) -> bytes:
        return self.memory.read(block_ids, 0, len(block_ids) * self.memory.block_bytes)

    async def wait_for(self, key: PeerKey, state: worker_pb2.PairState) -> worker_pb2.Pair:
        async with within(10):
            while True:
                for pair in self.pairs.pairs():
                    mine = (pair.source_address, pair.source_incarnation) == key
                    if mine and pair.state == state:
                        return pair
                await asyncio.sleep(0.005)

    async def connect(self, source: Source) -> worker_pb2.Pair:
        self.pairs.set_peers("router", [source.key])
        return await self.wait_for(source.key, worker_pb2.PAIR_STATE_PROVEN)

    def request(
        self,
        source: Source,
        ticket: bytes,
        num_tokens: int,
        local_block_ids: Sequence[int],
        first: int = 0,
        prompt_digest: bytes = b"",
    ) -> PullRequest:
        return PullRequest(
            source_address=source.address,
            source_incarnation=source.endpoint.incarnation,
            ticket=ticket,
            first_missing_token=first,
            num_tokens=num_tokens,
            prompt_digest=prompt_digest,
            local_block_ids=tuple(local_block_ids),
        )


@asynccontextmanager
async def open_source(
    transfer: TransferConfig,
    *,
    num_blocks: int = 64,
    block_bytes: int = 4096,
    incarnation: str = "source",
    address: str = "127.0.0.1:0",
    kv_layout: common_pb2.KVLayout | None = None,
    timers: Timers = TIMERS,
    memory: PoolMemory | RankPools | None = None,
) -> AsyncIterator[Source]:
    """``memory`` instead of one on the host, of as many blocks."""
    shared = SharedBytes(num_blocks * block_bytes)
    memory = memory or HostMemory(shared.buffer, block_bytes, shared.fd)
    endpoint = await TransferEndpoint.open(
        transfer,
        incarnation=incarnation,
        layout=kv_layout or layout(block_bytes, transfer.digest_level),
        memory=memory,
        read_only=True,
    )
    generations: dict[int, int] = {}
    leases = LeaseTable(BLOCK_SIZE, lambda block_id: generations.get(block_id, 0))
    scratch = PoolScratch(range(num_blocks - NUM_SCRATCH, num_blocks))
    servicer = KVSourceServicer(endpoint, leases, scratch=scratch, timers=timers)
    server = make_server()
    pb_grpc.add_KVSourceServicer_to_server(servicer, server)
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield Source(endpoint, leases, servicer, memory, f"127.0.0.1:{port}", generations, scratch)
    finally:
        await server.stop(0)
        await endpoint.close()


@asynccontextmanager
async def open_reader(
    transfer: TransferConfig,
    *,
    num_blocks: int = 64,
    block_bytes: int = 4096,
    incarnation: str = "reader",
    kv_layout: common_pb2.KVLayout | None = None,
    timers: Timers = TIMERS,
    interceptor: LinkInterceptor | None = None,
    memory: PoolMemory | RankPools | None = None,
) -> AsyncIterator[Reader]:
    """``memory`` instead of one on the host, of as many blocks."""
    shared = SharedBytes(num_blocks * block_bytes)
    memory = memory or HostMemory(shared.buffer, block_bytes, shared.fd)
    endpoint = await TransferEndpoint.open(
        transfer,
        incarnation=incarnation,
        layout=kv_layout or layout(block_bytes, transfer.digest_level),
        memory=memory,
    )
    quarantined: set[int] = set()
    scratch = PoolScratch(range(num_blocks - NUM_SCRATCH, num_blocks))

    def begin(block_ids: frozenset[int]) -> None:
        assert not quarantined & block_ids
        quarantined.update(block_ids)
        reader.num_quarantined += len(block_ids)

    def end(block_ids: frozenset[int]) -> None:
        assert block_ids <= quarantined
        quarantined.difference_update(block_ids)

    pairs = PairTable(
        endpoint,
        scratch=scratch,
        dialer=Dialer(timers),
        on_change=lambda: None,
        on_quarantine=begin,
        on_quarantine_end=end,
        interceptor=interceptor,
    )
    reader = Reader(endpoint, pairs, memory, scratch, quarantined)
    try:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(pairs.run())
            try:
                yield reader
            finally:
                running.cancel()
    finally:
        await endpoint.close()


def agents(transport: Transport) -> list[ChildTransport]:
    """Of each rank, in processes of their own."""
    assert isinstance(transport, RankTransports)
    return [part for part in transport.parts if isinstance(part, ChildTransport)]


async def until_idle(source: Source) -> None:
    await until(lambda: not source.servicer.counters.num_fetches_open)


async def until_digested(source: Source, lease_id: str = "lease") -> None:
    await until(lambda: all(r.digests is not None for r in source.leases.ranges(lease_id)))


async def failure_of(
    reader: Reader, source: Source, ticket: bytes, num_tokens: int = NUM_TOKENS
) -> PullError:
    """How a pull into LOCAL fails."""
    with pytest.raises(PullError) as excinfo:
        await reader.pairs.open_pull(reader.request(source, ticket, num_tokens, LOCAL)).run()
    return excinfo.value

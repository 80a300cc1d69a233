"""What it takes to trust one way to a source: connect, compare, move random blocks."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from random import Random
from typing import NamedTuple

import grpc

from diptych.errors import (
    RETRY_LATER_S,
    BlocksExhaustedError,
    LayoutMismatchError,
    TransferInterruptedError,
)
from diptych.rpc.peer_channel import Dialer
from diptych.rpc.status import from_rpc_error
from diptych.timers import Timers
from diptych.v1 import common_pb2, decode_pb2, kv_source_pb2
from diptych.v1 import kv_source_pb2_grpc as pb_grpc
from kvtransfer.endpoint import REBUILD_WAIT_S, TransferEndpoint, compare_layouts
from kvtransfer.errors import TransportError
from kvtransfer.memory import ScratchBlocks
from kvtransfer.reader.failures import connect_failure, read_failure
from kvtransfer.reader.fetch_driver import FetchDriver, FetchPlan
from kvtransfer.reader.proven_link import Link, ProvenLink, RefusedLinks
from kvtransfer.reader.pull_machine import PullError
from kvtransfer.reader.quarantine import Quarantine
from kvtransfer.transports.base import Peer
from kvtransfer.transports.ways import NoWay, Way, shortfalls, way_between

_WARM_PROBES = 3  # at the most, until one went the way that it had to go
_PROBE_S = 10.0  # from its turn here to its end, the wait for its turn at the source included


class ProbeKit(NamedTuple):
    """What every pair needs to prove itself."""

    endpoint: TransferEndpoint
    scratch: ScratchBlocks
    quarantine: Quarantine  # of scratch blocks: they are freed when it ends
    dialer: Dialer
    turns: asyncio.Semaphore  # of probes at once: there are scratch blocks for so many
    random: Random  # spreads what would else be tried at the same moment by all readers

    @property
    def timers(self) -> Timers:
        return self.dialer.timers


class LinkProver:
    """Proves links to one source process over one channel. Event loop only."""

    def __init__(
        self,
        kit: ProbeKit,
        incarnation: str,
        channel: grpc.aio.Channel,
        refused: RefusedLinks,
    ) -> None:
        """``refused``: the caller's, which closes it; those that are refused here go there."""
        self._kit = kit
        self._refused = refused
        self._incarnation = incarnation  # the source's
        self._stub: pb_grpc.KVSourceAsyncStub = pb_grpc.KVSourceStub(channel)

    async def connect(self, wanted: list[str]) -> kv_source_pb2.ConnectResponse:
        """Ask the source how to read it: over the first it has of these transports.

        Raises DiptychError, LayoutMismatchError where no transport could help,
        TransferInterruptedError where the answer cannot be read.
        """
        endpoint = self._kit.endpoint
        request = kv_source_pb2.ConnectRequest(
            reader_incarnation=endpoint.incarnation,
            layout=endpoint.layout,
            transports=wanted,
            pool=endpoint.pool,
        )
        try:
            response = await self._stub.Connect(request, timeout=self._kit.timers.lost_peer_s)
        except grpc.aio.AioRpcError as error:
            raise connect_failure(from_rpc_error(error)) from error
        if not isinstance(response, kv_source_pb2.ConnectResponse):  # gRPC's word for it is None
            raise TransferInterruptedError("the source's answer to Connect cannot be read")
        compare_layouts(endpoint.layout, response.layout)
        if response.source_incarnation != self._incarnation:
            raise TransferInterruptedError(
                f"at this address is {response.source_incarnation}, not {self._incarnation}"
            )
        if response.transport not in wanted:
            raise LayoutMismatchError(
                f"transports: the source chose {response.transport!r} of {wanted}",
                field="transports",
            )
        self._way(response)
        return response

    def _shortfall(self, response: kv_source_pb2.ConnectResponse) -> str:
        ranked = list(self._kit.endpoint.transports)
        better = ranked[: ranked.index(response.transport)]
        return shortfalls(better, response.pool, self._kit.endpoint.pool)

    def _way(self, response: kv_source_pb2.ConnectResponse) -> Way:
        way = way_between(response.transport, response.pool, self._kit.endpoint.pool)
        if isinstance(way, NoWay):
            raise LayoutMismatchError(
                f"transports: the source chose {response.transport}: {way.why}", field="transports"
            )
        return way

    async def prove(self, response: kv_source_pb2.ConnectResponse) -> ProvenLink:
        """Open the link that the source described and move blocks. The caller closes it.

        Raises PullError; BlocksExhaustedError when the source had no turn for it in time.
        """
        link = await self._open(response)
        try:
            await self._pull_probe(link)
            rate = await self._warm_rate(link)
        except TransportError as error:  # it works, and goes another way
            self._refused.keep(link, response.memory)
            raise PullError(decode_pb2.PULL_FAILURE_TRANSPORT, str(error)) from error
        except BaseException:
            link.close()
            raise
        return ProvenLink(link, rate, self._shortfall(response))

    async def _warm_rate(self, link: Link) -> float:
        """Bytes/s of a probe over a connection that is made. Raises TransportError: another way.

        What makes the connection may not be over yet with the first probe, and a read is not
        before that is: so one that seems to have gone another way is judged by the next one.
        """
        for _ in range(_WARM_PROBES - 1):
            with suppress(TransportError):
                return await self._judged_rate(link)
        return await self._judged_rate(link)

    async def _judged_rate(self, link: Link) -> float:
        stats = await self._pull_probe(link)
        await self._on_thread(link.peer.check_lane)
        return _checked_rate(stats, link.way)

    async def _open(self, response: kv_source_pb2.ConnectResponse) -> Link:
        endpoint = self._kit.endpoint
        kept = self._refused.take(response.transport, response.memory)
        if kept is not None:
            return Link(self._stub, kept.transport, kept.peer, kept.close, self._way(response))
        transport = endpoint.transports[response.transport]
        await endpoint.until_ready(transport, REBUILD_WAIT_S)
        opened: list[Peer] = []  # filled by the thread even if we are cancelled meanwhile
        close = partial(endpoint.thread.post, partial(_close_all, opened))
        try:
            await self._on_thread(lambda: opened.append(transport.connect(response.memory)))
        except TransportError as error:
            raise read_failure(error) from error
        except BaseException:
            close()
            raise
        return Link(self._stub, response.transport, opened[0], close, self._way(response))

    async def _on_thread(self, job: Callable[[], None]) -> None:
        """Run ``job`` on the transfer thread. Raises what it does; PullError: it takes too long."""
        patience_s = self._kit.timers.read_progress_s
        try:
            async with asyncio.timeout(patience_s):
                await self._kit.endpoint.thread.call(job)
        except TimeoutError:
            raise PullError(
                decode_pb2.PULL_FAILURE_TRANSPORT,
                f"the transfer thread has not answered for {patience_s} s",
            ) from None

    async def _pull_probe(self, link: Link) -> common_pb2.TransferStats:
        """Wait for a turn, here and at the source; then a probe is a pull like any other."""
        async with self._kit.turns:
            try:
                async with asyncio.timeout(_PROBE_S):
                    return await self._pull_scratch(link)
            except TimeoutError:
                raise BlocksExhaustedError(
                    f"the probe was not done within {_PROBE_S:.0f} s", retry_after_s=RETRY_LATER_S
                ) from None

    async def _pull_scratch(self, link: Link) -> common_pb2.TransferStats:
        kit = self._kit
        num_blocks = kit.endpoint.config.probe_blocks
        plan = FetchPlan(
            open=kv_source_pb2.FetchOpen(
                reader_incarnation=kit.endpoint.incarnation,
                source_incarnation=self._incarnation,
                num_probe_blocks=num_blocks,
                transport=link.transport,
            ),
            end_token=num_blocks * kit.endpoint.layout.block_size,
            prompt_digest=b"",
            local_block_ids=tuple(kit.scratch.allocate(num_blocks)),
        )
        fetch = FetchDriver(plan, link, kit.endpoint, kit.quarantine, kit.timers)
        try:
            return (await fetch.run()).stats
        finally:
            unfinished = fetch.abandon()
            kit.scratch.free([b for b in plan.local_block_ids if b not in unfinished])


def _checked_rate(stats: common_pb2.TransferStats, way: Way) -> float:
    """Bytes/s. Raises TransportError: so slow that they did not go that way."""
    rate = stats.num_bytes / max(stats.read_s, 1e-9)
    if rate < way.least_bytes_per_s:
        raise TransportError(
            f"{rate / 1e9:.2f} GB/s is less than the {way.least_bytes_per_s / 1e9:.0f} of this way "
            f"({way.text}): the blocks went over TCP"
        )
    return rate


def _close_all(peers: list[Peer]) -> None:
    for peer in peers:
        peer.close()

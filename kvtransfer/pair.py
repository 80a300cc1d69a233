"""One source as its reader keeps it: connect, compare, prove, measure; again after a loss."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import grpc

from diptych import rpc
from diptych.errors import DiptychError, LayoutMismatchError, TransferInterruptedError
from diptych.timers import Timers
from diptych.v1 import common_pb2, decode_pb2, kv_source_pb2, worker_pb2
from diptych.v1 import kv_source_pb2_grpc as pb_grpc
from kvtransfer.endpoint import REBUILD_WAIT_S, TransferEndpoint
from kvtransfer.failures import connect_failure, read_failure
from kvtransfer.layout import compare_layouts
from kvtransfer.memory import ScratchBlocks
from kvtransfer.pull import PullError
from kvtransfer.quarantine import Quarantine
from kvtransfer.race import first_to_end
from kvtransfer.reader import Link, Pull, PullPlan
from kvtransfer.transport import Peer, TransportError

logger = logging.getLogger(__name__)

_TRANSPORT_TRIES = 3  # before the next transport's turn
_AGENT_TRIES = 20  # the same, where an agent ended: the next one is on its way
_RATE_WEIGHT = 0.2  # of the newest pull in the moving average


class PeerKey(NamedTuple):
    """A source process; a restart at the same address is another one."""

    address: str
    incarnation: str


class ProbeKit(NamedTuple):
    """What every pair needs to prove itself."""

    endpoint: TransferEndpoint
    scratch: ScratchBlocks
    quarantine: Quarantine  # of scratch blocks: they are freed when it ends
    timers: Timers


class SourcePair:
    """The entry of one source process. Event loop; ``keep`` is its one task."""

    def __init__(
        self,
        key: PeerKey,
        kit: ProbeKit,
        on_change: Callable[[], None],
        on_fallback: Callable[[], None],
        on_failure: Callable[[str], None],
    ) -> None:
        """``on_failure`` gets the error's reason each time the pair fails to be proven."""
        self.key = key
        self.link: Link | None = None  # while PROVEN
        self._kit = kit
        self._on_change = on_change
        self._on_fallback = on_fallback
        self._on_failure = on_failure
        self._lost = asyncio.Event()
        self._changed = asyncio.Event()
        self._state = worker_pb2.PAIR_STATE_CONNECTING
        self._message = ""
        self._bytes_per_s = 0.0

    def to_proto(self) -> worker_pb2.Pair:
        return worker_pb2.Pair(
            source_address=self.key.address,
            source_incarnation=self.key.incarnation,
            state=self._state,
            transport=self.link.transport if self.link is not None else "",
            bytes_per_s=self._bytes_per_s,
            message=self._message,
        )

    async def until_proven(self, timeout_s: float) -> Link | None:
        """Wait while the pair is being proven. None: it fails, is left, or takes longer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._state == worker_pb2.PAIR_STATE_CONNECTING:
                    self._changed.clear()
                    await self._changed.wait()
        return self.link

    def leave(self) -> None:
        """No router names the source any more: nobody is to wait for it."""
        self._state, self._message = worker_pb2.PAIR_STATE_FAILED, "nobody names the source"
        self._changed.set()

    def lost(self, why: str) -> None:
        """Something failed over this pair: prove it again."""
        if self.link is not None:
            self._become(worker_pb2.PAIR_STATE_CONNECTING, why)
            self._lost.set()

    def measured(self, stats: common_pb2.TransferStats) -> None:
        """A pull was proven."""
        if stats.read_s > 0:
            rate = stats.num_bytes / stats.read_s
            self._bytes_per_s += _RATE_WEIGHT * (rate - self._bytes_per_s)

    async def keep(self) -> None:
        """Keep the pair proven until cancelled."""
        config = self._kit.endpoint.config
        wait_s = config.reconnect_min_s
        async with rpc.channel(self.key.address) as channel:
            stub: pb_grpc.KVSourceAsyncStub = pb_grpc.KVSourceStub(channel)
            while True:
                try:
                    await self._prove(stub)
                    wait_s = config.reconnect_min_s
                    await first_to_end(
                        lost=self._until_lost, channel=partial(self._until_down, channel)
                    )
                except LayoutMismatchError as error:
                    logger.error(
                        "pair refused", extra={"source": self.key.address, "why": error.message}
                    )
                    self._fail(error.reason, error.message)
                    await asyncio.Event().wait()  # nothing but a new process can heal this
                except DiptychError as error:
                    self._fail(error.reason, error.message)
                except Exception as error:  # a bug in one pair must not end the others
                    logger.exception("pair failed", extra={"source": self.key.address})
                    self._fail("INTERNAL", f"internal: {error!r}")
                finally:
                    self._disconnect()
                if self._state == worker_pb2.PAIR_STATE_FAILED:
                    await asyncio.sleep(wait_s)
                    wait_s = min(2 * wait_s, config.reconnect_max_s)

    async def _prove(self, stub: "pb_grpc.KVSourceAsyncStub") -> None:
        """Connect over the first transport that works. Raises DiptychError."""
        wanted = list(self._kit.endpoint.transports)
        failures: dict[str, str] = {}
        num_tries = num_agent_tries = 0
        while wanted:
            name = wanted[0]
            try:
                response = await self._connect(stub, wanted)
                name = response.transport
                link = await self._open_link(stub, response)
                rate = await self._probe(link)
            except PullError as error:
                if error.agent_lost and num_agent_tries < _AGENT_TRIES:
                    num_agent_tries += 1
                    await asyncio.sleep(self._kit.endpoint.config.reconnect_min_s)
                    continue
                lost = error.failure == decode_pb2.PULL_FAILURE_SOURCE_LOST
                if error.refusal or (lost and not error.agent_lost):
                    raise  # not the transport's fault
                failures[name] = error.message
                num_tries += 1
                if num_tries < _TRANSPORT_TRIES:  # what a stopped peer left behind heals
                    await asyncio.sleep(self._kit.endpoint.config.reconnect_min_s)
                    continue
                logger.warning(
                    "transport refused", extra={"transport": name, "error": error.message}
                )
                wanted, num_tries = wanted[wanted.index(name) + 1 :], 0
                if wanted:
                    self._on_fallback()
                continue
            failures.pop(name, None)
            self._bytes_per_s = rate
            self._lost.clear()
            self.link = link
            self._become(worker_pb2.PAIR_STATE_PROVEN, _listed(failures))
            return
        raise PullError(decode_pb2.PULL_FAILURE_TRANSPORT, _listed(failures))

    async def _connect(
        self, stub: "pb_grpc.KVSourceAsyncStub", wanted: list[str]
    ) -> kv_source_pb2.ConnectResponse:
        endpoint = self._kit.endpoint
        request = kv_source_pb2.ConnectRequest(
            reader_incarnation=endpoint.incarnation, layout=endpoint.layout, transports=wanted
        )
        try:
            response = await stub.Connect(request, timeout=self._kit.timers.lost_peer_s)
        except grpc.aio.AioRpcError as error:
            raise connect_failure(rpc.from_rpc_error(error)) from error
        compare_layouts(endpoint.layout, response.layout)
        if response.source_incarnation != self.key.incarnation:
            raise TransferInterruptedError(
                f"at this address is {response.source_incarnation}, not {self.key.incarnation}"
            )
        if response.transport not in wanted:
            raise LayoutMismatchError(
                f"transports: the source chose {response.transport!r} of {wanted}",
                field="transports",
            )
        return response

    async def _open_link(
        self, stub: "pb_grpc.KVSourceAsyncStub", response: kv_source_pb2.ConnectResponse
    ) -> Link:
        endpoint = self._kit.endpoint
        transport = endpoint.transports[response.transport]
        await endpoint.until_ready(transport, REBUILD_WAIT_S)
        opened: list[Peer] = []  # filled by the thread even if we are cancelled meanwhile
        try:
            await endpoint.thread.call(lambda: opened.append(transport.connect(response.memory)))
        except TransportError as error:
            raise read_failure(error) from error
        except BaseException:
            endpoint.thread.post(partial(_close_all, opened))
            raise
        return Link(stub, response.transport, opened[0])

    async def _probe(self, link: Link) -> float:
        """Move random blocks twice, the second time warm. Returns bytes/s. Raises PullError."""
        endpoint = self._kit.endpoint
        try:
            await self._pull_probe(link)
            stats = await self._pull_probe(link)
            await endpoint.thread.call(link.peer.check_lane)
        except TransportError as error:
            endpoint.thread.post(link.peer.close)
            raise PullError(decode_pb2.PULL_FAILURE_TRANSPORT, str(error)) from error
        except BaseException:
            endpoint.thread.post(link.peer.close)
            raise
        return stats.num_bytes / max(stats.read_s, 1e-9)

    async def _pull_probe(self, link: Link) -> common_pb2.TransferStats:
        kit = self._kit
        num_blocks = kit.endpoint.config.probe_blocks
        plan = PullPlan(
            open=kv_source_pb2.FetchOpen(
                reader_incarnation=kit.endpoint.incarnation,
                source_incarnation=self.key.incarnation,
                num_probe_blocks=num_blocks,
                transport=link.transport,
            ),
            end_token=num_blocks * kit.endpoint.layout.block_size,
            prompt_digest=b"",
            local_block_ids=tuple(kit.scratch.allocate(num_blocks)),
        )
        pull = Pull(plan, link, kit.endpoint, kit.quarantine, kit.timers)
        try:
            return (await pull.run()).stats
        finally:
            unfinished = pull.abandon()
            kit.scratch.free([b for b in plan.local_block_ids if b not in unfinished])

    async def _until_lost(self) -> None:
        await self._lost.wait()

    async def _until_down(self, channel: grpc.aio.Channel) -> None:
        state = channel.get_state()
        while state is grpc.ChannelConnectivity.READY:
            await channel.wait_for_state_change(state)
            state = channel.get_state()
        self.lost("the connection broke")

    def _fail(self, reason: str, message: str) -> None:
        self._on_failure(reason)
        self._become(worker_pb2.PAIR_STATE_FAILED, message)

    def _become(self, state: worker_pb2.PairState, message: str) -> None:
        if state != worker_pb2.PAIR_STATE_PROVEN:
            self._disconnect()
        self._state, self._message = state, message
        self._changed.set()
        self._on_change()

    def _disconnect(self) -> None:
        link, self.link = self.link, None
        if link is not None:
            self._kit.endpoint.thread.post(partial(link.peer.close))


def _close_all(peers: list[Peer]) -> None:
    for peer in peers:
        peer.close()


def _listed(failures: dict[str, str]) -> str:
    return "; ".join(f"{name}: {message}" for name, message in failures.items())

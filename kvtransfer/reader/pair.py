"""One source as its reader keeps it: proven over the best transport; again after a loss."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import grpc

from diptych.errors import DiptychError, LayoutMismatchError
from diptych.rpc.peer_channel import PeerChannel
from diptych.v1 import common_pb2, decode_pb2, kv_source_pb2, worker_pb2
from kvtransfer.first_done import first_to_end
from kvtransfer.reader.pair_machine import PairMachine, PairState
from kvtransfer.reader.proof import LinkProver, ProbeKit
from kvtransfer.reader.proven_link import Link, ProvenLink, RefusedLinks
from kvtransfer.reader.pull_machine import PullError
from kvtransfer.reader.retry_pause import RetryPause
from kvtransfer.reader.transport_rests import TransportRests
from kvtransfer.reader.transport_search import TransportSearch, Turn

logger = logging.getLogger(__name__)

_NAMES = {
    PairState.CONNECTING: worker_pb2.PAIR_STATE_CONNECTING,
    PairState.PROVEN: worker_pb2.PAIR_STATE_PROVEN,
    PairState.FAILED: worker_pb2.PAIR_STATE_FAILED,
    PairState.REFUSED: worker_pb2.PAIR_STATE_FAILED,
    PairState.LEFT: worker_pb2.PAIR_STATE_FAILED,
}


class PeerKey(NamedTuple):
    """A source process; a restart at the same address is another one."""

    address: str
    incarnation: str


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
        self._kit = kit
        self._on_change = on_change
        self._on_fallback = on_fallback
        self._on_failure = on_failure
        self._machine = PairMachine()
        self._rests = TransportRests(kit.random)
        self._refused = RefusedLinks()
        self._moved = asyncio.Event()  # the machine did

    @property
    def link(self) -> Link | None:
        """What pulls go over; None unless it is proven."""
        return self._machine.link

    @property
    def message(self) -> str:
        """Why it is not proven, or not over a better transport."""
        return self._machine.message

    @property
    def is_being_proven(self) -> bool:
        """Whether it may be proven soon; else ``message`` says why it is not."""
        return self._machine.state is PairState.CONNECTING

    def to_proto(self) -> worker_pb2.Pair:
        machine = self._machine
        told = worker_pb2.Pair(
            source_address=self.key.address,
            source_incarnation=self.key.incarnation,
            state=_NAMES[machine.state],
            transport=machine.link.transport if machine.link is not None else "",
            bytes_per_s=machine.bytes_per_s,
            message=machine.message,
            way=machine.link.way.text if machine.link is not None else "",
        )
        (fixed_s, byte_s), upper_ratio, num_pulls = machine.cost.learned
        if num_pulls:
            cost = worker_pb2.TransferCost(
                fixed_s=fixed_s, byte_s=byte_s, upper_ratio=upper_ratio, num_pulls=num_pulls
            )
            told.transfer.CopyFrom(cost)
        return told

    async def until_proven(self, timeout_s: float) -> Link | None:
        """Wait while the pair is being proven. None: it fails, is left, or takes longer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._while(PairState.CONNECTING)
        return self.link

    def leave(self) -> None:
        """No router names the source any more: nobody is to wait for it. Idempotent."""
        _close(self._machine.leave("nobody names the source"))
        self._moved.set()

    def lost(self, why: str) -> None:
        """Something failed over this pair: prove it again."""
        link = self._machine.lose(why)
        if link is not None:  # else it was lost before
            link.close()
            self._tell()

    def measured(self, stats: common_pb2.TransferStats) -> None:
        """A pull was proven."""
        if stats.read_s > 0:
            self._machine.measured(stats.num_bytes, stats.read_s)

    async def keep(self) -> None:
        """Keep the pair proven until cancelled."""
        pause = RetryPause(self._kit.endpoint.config, self._kit.random)
        peer = PeerChannel(self._kit.dialer, self.key.address, "prefill")
        try:
            while self._machine.state is not PairState.REFUSED:
                if self._machine.state is PairState.FAILED:
                    await asyncio.sleep(pause.next_s())
                await self._keep_once(peer, pause)
            await asyncio.Event().wait()  # nothing but a new process can heal this
        finally:
            self.leave()
            self._refused.close()
            await peer.close()

    async def _keep_once(self, peer: PeerChannel, pause: RetryPause) -> None:
        """Prove it; return when it has failed, or was lost."""
        try:
            channel = await peer.renewed()
            prover = LinkProver(self._kit, self.key.incarnation, channel, self._refused)
            await self._prove(prover)
            pause.reset()
            await first_to_end(
                lost=partial(self._while, PairState.PROVEN),
                channel=partial(self._until_down, channel),
                improve=partial(self._keep_improving, prover),
            )
        except LayoutMismatchError as error:
            extra = {"source": self.key.address, "why": error.message}
            logger.error("pair refused", extra=extra)
            self._machine.refuse(error.message)
            self._failed(error.reason)
        except DiptychError as error:
            _close(self._machine.fail(error.message))
            self._failed(error.reason)
        except Exception as error:  # a bug in one pair must not end the others
            logger.exception("pair failed", extra={"source": self.key.address})
            _close(self._machine.fail(f"internal: {error!r}"))
            self._failed("INTERNAL")

    async def _prove(self, prover: LinkProver) -> None:
        """Connect over the first transport that works. Raises DiptychError."""
        search = TransportSearch(self._kit.endpoint.transports)
        while search.wanted:
            name = search.wanted[0]
            try:
                response = await prover.connect(search.wanted)
                name = response.transport
                if self._rests_now(response, search):
                    continue
                proven = await self._proof(prover, response)
            except LayoutMismatchError:
                if not search.has_failures:
                    raise  # no transport could help
                break  # the source has none of the rest: those that failed may heal
            except PullError as error:
                if search.failed(name, error) is Turn.SAME:
                    await asyncio.sleep(self._kit.endpoint.config.reconnect_min_s)
                    continue
                extra = {"transport": name, "error": error.message}
                logger.warning("transport refused", extra=extra)
                if search.wanted:
                    self._on_fallback()
            else:
                search.worked(name)
                self._rests.worked(name)
                message = _joined(search.message, proven.shortfall)
                _close(self._machine.prove(proven, message))
                self._log_proven("pair proven", proven)
                self._tell()
                return
        self._rests.nothing_else_works(self._kit.endpoint.config.reprove_s)
        raise search.error

    def _rests_now(self, response: kv_source_pb2.ConnectResponse, search: TransportSearch) -> bool:
        """Whether what the source chose is left alone for now, and so passed over."""
        name = response.transport
        why = self._rests.resting(name, response.memory, time.monotonic())
        if why is not None:
            search.pass_over(name, why)
        return why is not None

    async def _proof(
        self, prover: LinkProver, response: kv_source_pb2.ConnectResponse
    ) -> ProvenLink:
        """Prove a link whose agent can start and is still there. Raises as ``prover.prove``."""
        name = response.transport
        transport = self._kit.endpoint.transports[name]
        if transport.problem:
            raise PullError(decode_pb2.PULL_FAILURE_TRANSPORT, transport.problem)
        try:
            proven = await prover.prove(response)
        except PullError as error:
            if error.took_agent or error.broke_agent:
                error.took_agent = self._rests.took_agent(
                    name,
                    error.message,
                    response.memory,
                    time.monotonic(),
                    self._kit.endpoint.config.reprove_s,
                    by_read=not error.took_agent,
                )
            raise
        if not proven.link.peer.usable:  # nobody will say so again
            proven.link.close()
            message = "the transport agent ended"
            raise PullError(decode_pb2.PULL_FAILURE_TRANSPORT, message, agent_lost=True)
        return proven

    async def _keep_improving(self, prover: LinkProver) -> None:
        """Try the transports that are wanted more again and again, beside the pulls under way."""
        while True:
            await asyncio.sleep(self._kit.endpoint.config.reprove_s)
            if self.link is None:
                continue
            try:
                await self._improve(prover, self.link.transport)
            except DiptychError as error:
                self._log_no_better(error)

    async def _improve(self, prover: LinkProver, before: str) -> None:
        """Replace the link over ``before`` by a better one, if one can be proven.

        Raises DiptychError.
        """
        ranked = list(self._kit.endpoint.transports)
        search = TransportSearch(ranked[: ranked.index(before) + 1])
        while search.wanted[0] != before:
            response = await prover.connect(search.wanted)
            if response.transport == before:  # all that the source can offer
                return
            if self._rests_now(response, search):
                continue
            try:
                proven = await self._proof(prover, response)
            except PullError as error:
                self._log_no_better(error)
                search.pass_over(response.transport, error.message)
                continue
            self._rests.worked(response.transport)
            self._replace(proven, _joined(search.message, proven.shortfall))
            return

    def _replace(self, proven: ProvenLink, message: str) -> None:
        """Use a better link, unless the pair was lost meanwhile."""
        unused = self._machine.improve(proven, message)
        unused.retire()
        if unused is proven.link:
            return
        self._log_proven("better transport proven", proven, before=unused.transport)
        self._tell()

    def _log_proven(self, what: str, proven: ProvenLink, **more: str) -> None:
        link = proven.link
        extra = {
            "source": self.key.address,
            "transport": link.transport,
            "way": link.way.text,
            "gb_per_s": round(proven.bytes_per_s / 1e9, 3),
            **more,
        }
        logger.info(what, extra=extra)

    def _log_no_better(self, error: DiptychError) -> None:
        extra = {"source": self.key.address, "error": error.message}
        logger.debug("no better transport", extra=extra)

    async def _while(self, state: PairState) -> None:
        while self._machine.state is state:
            self._moved.clear()
            await self._moved.wait()

    async def _until_down(self, channel: grpc.aio.Channel) -> None:
        state = channel.get_state()
        while state is grpc.ChannelConnectivity.READY:
            await channel.wait_for_state_change(state)
            state = channel.get_state()
        self.lost("the connection broke")

    def _failed(self, reason: str) -> None:
        self._on_failure(reason)
        self._tell()

    def _tell(self) -> None:
        self._moved.set()
        self._on_change()


def _joined(*messages: str) -> str:
    return "; ".join(filter(None, messages))


def _close(link: Link | None) -> None:
    if link is not None:
        link.close()

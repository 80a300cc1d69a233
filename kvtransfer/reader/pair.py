"""One source as its reader keeps it: proven over the best transport; again after a loss."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import grpc

from diptych.errors import DiptychError, LayoutMismatchError
from diptych.rpc.channel import open_channel
from diptych.v1 import common_pb2, decode_pb2, kv_source_pb2, worker_pb2
from kvtransfer.first_done import first_to_end
from kvtransfer.reader.proof import LinkProver, ProbeKit, ProvenLink
from kvtransfer.reader.proven_link import Link
from kvtransfer.reader.pull_machine import PullError

logger = logging.getLogger(__name__)

_TRANSPORT_TRIES = 3  # before the next transport's turn
_AGENT_TRIES = 20  # the same, where an agent ended: the next one is on its way
_RATE_WEIGHT = 0.2  # of the newest pull in the moving average


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
        self.link: Link | None = None  # while PROVEN
        self.message = ""  # why it is not proven, or not over a better transport
        self._kit = kit
        self._on_change = on_change
        self._on_fallback = on_fallback
        self._on_failure = on_failure
        self._lost = asyncio.Event()
        self._changed = asyncio.Event()
        self._state = worker_pb2.PAIR_STATE_CONNECTING
        self._bytes_per_s = 0.0

    def to_proto(self) -> worker_pb2.Pair:
        return worker_pb2.Pair(
            source_address=self.key.address,
            source_incarnation=self.key.incarnation,
            state=self._state,
            transport=self.link.transport if self.link is not None else "",
            bytes_per_s=self._bytes_per_s,
            message=self.message,
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
        self._state, self.message = worker_pb2.PAIR_STATE_FAILED, "nobody names the source"
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
        async with open_channel(self.key.address, self._kit.timers) as channel:
            prover = LinkProver(self._kit, self.key.incarnation, channel)
            while True:
                try:
                    await self._prove(prover)
                    wait_s = config.reconnect_min_s
                    await first_to_end(
                        lost=self._until_lost,
                        channel=partial(self._until_down, channel),
                        improve=partial(self._keep_improving, prover),
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
                    await asyncio.sleep(self._kit.random.uniform(0.5, 1.5) * wait_s)
                    wait_s = min(2 * wait_s, config.reconnect_max_s)

    async def _prove(self, prover: LinkProver) -> None:
        """Connect over the first transport that works. Raises DiptychError."""
        wanted = list(self._kit.endpoint.transports)
        failures: dict[str, str] = {}
        num_tries = num_agent_tries = 0
        while wanted:
            name = wanted[0]
            try:
                response = await prover.connect(wanted)
                name = response.transport
                proven = await self._proof(prover, response)
            except LayoutMismatchError:
                if not failures:
                    raise  # no transport could help
                break  # the source has none of the rest: those that failed may heal
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
            self._lost.clear()
            self._use(proven, failures)
            return
        raise PullError(decode_pb2.PULL_FAILURE_TRANSPORT, _listed(failures))

    async def _proof(
        self, prover: LinkProver, response: kv_source_pb2.ConnectResponse
    ) -> ProvenLink:
        """Prove a link whose agent can start and is still there. Raises as ``prover.prove``."""
        transport = self._kit.endpoint.transports[response.transport]
        if transport.problem:
            raise PullError(decode_pb2.PULL_FAILURE_TRANSPORT, transport.problem)
        proven = await prover.prove(response)
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
                await self._improve(prover, self.link)
            except DiptychError as error:
                self._log_no_better(error)

    async def _improve(self, prover: LinkProver, link: Link) -> None:
        """Replace ``link`` by a better one, if that can be proven. Raises DiptychError."""
        ranked = list(self._kit.endpoint.transports)
        wanted = ranked[: ranked.index(link.transport) + 1]
        failures: dict[str, str] = {}
        while wanted[0] != link.transport:
            response = await prover.connect(wanted)
            if response.transport == link.transport:  # all that the source can offer
                return
            try:
                proven = await self._proof(prover, response)
            except PullError as error:
                self._log_no_better(error)
                failures[response.transport] = error.message
                wanted = wanted[wanted.index(response.transport) + 1 :]
                continue
            if self.link is not link:  # the pair was lost meanwhile
                proven.link.close()
                return
            link.retire()
            logger.info(
                "better transport proven",
                extra={
                    "source": self.key.address,
                    "transport": response.transport,
                    "before": link.transport,
                },
            )
            self._use(proven, failures)
            return

    def _use(self, proven: ProvenLink, failures: dict[str, str]) -> None:
        self.link, self._bytes_per_s = proven
        self._become(worker_pb2.PAIR_STATE_PROVEN, _listed(failures))

    def _log_no_better(self, error: DiptychError) -> None:
        extra = {"source": self.key.address, "error": error.message}
        logger.debug("no better transport", extra=extra)

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
        self._state, self.message = state, message
        self._changed.set()
        self._on_change()

    def _disconnect(self) -> None:
        link, self.link = self.link, None
        if link is not None:
            link.close()


def _listed(failures: dict[str, str]) -> str:
    return "; ".join(f"{name}: {message}" for name, message in failures.items())

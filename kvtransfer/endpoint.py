"""An end of transfers: a pool's memory, transports and a transfer thread."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from google.protobuf.message import Message

from diptych.block_needs import BlockNeeds
from diptych.errors import ConfigurationError, LayoutMismatchError
from diptych.v1 import common_pb2, kv_source_pb2
from kvtransfer.config import TransferConfig, TransportName
from kvtransfer.memory import PoolMemory
from kvtransfer.rank_pools import RankPools
from kvtransfer.transports.base import Transport
from kvtransfer.transports.choice import Site, open_transport
from kvtransfer.transports.lanes import nixl_lanes
from kvtransfer.transports.thread import TransferThread, deliver

logger = logging.getLogger(__name__)

REBUILD_WAIT_S = 2.0  # for an agent that is being rebuilt, before the next transport's turn
_START_S = 30.0  # that a transport has to get ready: it may register a large pool
_OPEN_S = 120.0  # to be there at all: inside the process it registers a pool of a GPU
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CLOSE_S = 5.0  # that all of them have to end
_SERVE_ON_S = 5.0  # after the last fetch: reads that were under way as it ended have to end


class TransferEndpoint:
    """Owns a transfer thread and the transports' agents. Event loop only.

    One for each role of a worker process: it is read from, or it reads.
    """

    def __init__(
        self,
        config: TransferConfig,
        incarnation: str,
        layout: common_pb2.KVLayout,
        memory: PoolMemory | RankPools,
        *,
        read_only: bool = False,
        name: str = "",
    ) -> None:
        """Use ``open``."""
        self._read_only = read_only
        self._agent_name = f"{incarnation}.{name}" if name else incarnation
        self.config = config
        self.incarnation = incarnation
        self.layout = layout
        self.needs = BlockNeeds.of(layout)  # what of a block is shipped
        self.memory = memory
        self.thread = TransferThread()
        self.transports: dict[str, Transport] = {}  # as configured, most wanted first
        self.pool = _place(config, memory)
        self.on_change: Callable[[], None] = lambda: None  # a transport got ready, or is no more
        self._num_served = 0
        self._resting: asyncio.TimerHandle | None = None  # once no fetch is open
        self._changed = asyncio.Event()

    @classmethod
    async def open(
        cls,
        config: TransferConfig,
        *,
        incarnation: str,
        layout: common_pb2.KVLayout,
        memory: PoolMemory | RankPools,
        read_only: bool = False,
        name: str = "",
    ) -> "TransferEndpoint":
        """Start the thread, create the agents, register the memory (about 0.5 s with nixl).

        ``read_only``: of a source, whose memory peers read and no transport writes.
        ``name``: of this end, where a process has several: no two agents are called alike.
        ``layout.digest_level`` must equal ``config.digest_level``, and
        ``layout.block_bytes`` the memory's. Raises ConfigurationError: that, or no
        configured transport is available (one that cannot start is passed over with a
        warning where others can, and tries again; but ucxx, named on purpose, has to be
        installed).
        """
        for field, ours, theirs in (
            ("digest_level", config.digest_level, layout.digest_level),
            ("block_bytes", memory.block_bytes, layout.block_bytes),
        ):
            if ours != theirs:
                raise ConfigurationError(f"{field}: {ours!r} here, {theirs!r} in the KV layout")
        endpoint = cls(config, incarnation, layout, memory, read_only=read_only, name=name)
        endpoint.thread.start()
        try:
            for transport_name in config.transports:
                await endpoint._add(transport_name)
        except BaseException:
            await endpoint.close()
            raise
        return endpoint

    @contextmanager
    def serving(self) -> Iterator[None]:
        """While open, the passive side of one-sided reads is progressed.

        And for a while afterwards: a reader that gives a pull up has reads under way, which may
        need it to end, and their blocks are quarantined until they have.
        """
        self._num_served += 1
        self._cancel_rest()
        self._serve(True)
        try:
            yield
        finally:
            self._num_served -= 1
            if not self._num_served:
                loop = asyncio.get_running_loop()
                self._resting = loop.call_later(_SERVE_ON_S, self._serve, False)

    def expect_reads(self) -> None:
        """Whoever is served reads now, maybe over a new connection: to be looked at often."""
        if self._num_served:
            self._serve(True)

    async def until_ready(self, transport: Transport, timeout_s: float) -> bool:
        """Wait while ``transport`` is being (re)built; whether it is ready then."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not transport.ready and not transport.problem:
                    self._changed.clear()
                    await self._changed.wait()
        return transport.ready

    async def rebuild(self, name: str) -> None:
        """Replace one agent: reads that never ended end, with AgentLostError.

        Returns when the old agent, and every read over it, has ended. Every connection over
        it has to be made anew. Raises UndeadAgentError: it cannot be ended.
        """
        transport = self.transports[name]
        await self.thread.call(transport.rebuild)
        while transport.retiring:
            self.check_agents()
            self._changed.clear()
            await self._changed.wait()

    def check_agents(self) -> None:
        """Raise UndeadAgentError where one cannot be ended: then this process has to end."""
        for transport in self.transports.values():
            if transport.undead is not None:
                raise transport.undead

    async def close(self) -> None:
        """Destroy the agents, stop the thread. After servers and pair tables have stopped.

        A thread that is stuck is left to the end of the process.
        """
        self._cancel_rest()
        try:
            async with asyncio.timeout(_CLOSE_S):
                for transport in self.transports.values():
                    await self.thread.call(transport.close)
                await self.thread.call(_nothing)  # it may be stuck where there are none yet
        except TimeoutError:
            logger.error("the transfer thread is stuck and left behind")
            self.thread.stop(wait=False)
        else:
            self.thread.stop()

    async def _add(self, name: TransportName) -> None:
        changed = partial(deliver, asyncio.get_running_loop(), self._transport_changed)
        site = Site(
            self.config,
            self._agent_name,
            self.memory,
            stretch_bytes(self.layout),
            self.thread,
            changed,
            self._read_only,
            self.transports,
        )
        opening = partial(open_transport, name, site)
        try:
            async with asyncio.timeout(_OPEN_S):
                transport = self.transports[name] = await self.thread.call(opening)
        except TimeoutError:
            raise ConfigurationError(
                f"transfer.transports: {name}: its library hangs, for {_OPEN_S:.0f} s by now"
            ) from None
        if await self.until_ready(transport, _START_S):
            return
        problem = transport.problem or f"not ready within {_START_S:.0f} s"
        is_last = name == self.config.transports[-1]
        if is_last and not any(transport.ready for transport in self.transports.values()):
            raise ConfigurationError(f"transfer.transports: {name}: {problem}")
        logger.warning("transport not available", extra={"transport": name, "error": problem})

    def _cancel_rest(self) -> None:
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None

    def _serve(self, active: bool) -> None:
        for transport in self.transports.values():
            self.thread.post(partial(transport.serve, active))

    def _transport_changed(self) -> None:
        self._changed.set()
        self.on_change()


def _nothing() -> None:
    """Shows that the transfer thread is not stuck."""


def stretch_bytes(layout: common_pb2.KVLayout) -> int:
    """Of a whole block: the keys, or the values, of all heads of one layer."""
    return int(layout.block_bytes // max(1, 2 * layout.num_layers))


def _place(config: TransferConfig, memory: PoolMemory | RankPools) -> kv_source_pb2.PoolPlace:
    """What peers have to know of where the pool lies."""
    try:
        machine = _BOOT_ID.read_text().strip()
    except OSError:  # no Linux: then no two processes are known to be on one
        machine = ""
    return kv_source_pb2.PoolPlace(
        memory_kind=memory.memory_kind,
        device_id=memory.device_id,
        machine=machine,
        ucx_tls=nixl_lanes(config, memory.memory_kind).ucx_tls,
    )


_NUM_RANKS = "tensor_parallel_size"


def compare_layouts(reader: common_pb2.KVLayout, source: common_pb2.KVLayout) -> None:
    """Require equality field by field, fields added later included.

    But for the number of ranks, which may be any that the heads divide by.

    Raises LayoutMismatchError: names the first field that differs and both values.
    """
    for name, ours, theirs in _differences(reader, source):
        if name != _NUM_RANKS:
            raise _mismatch(name, ours, theirs)
    ours, theirs = reader.tensor_parallel_size, source.tensor_parallel_size
    for num_ranks in (ours, theirs):
        if reader.num_kv_heads % max(1, num_ranks):
            why = f": {num_ranks} cannot share {reader.num_kv_heads} key-value heads evenly"
            raise _mismatch(_NUM_RANKS, ours, theirs, why)


def _mismatch(name: str, ours: object, theirs: object, why: str = "") -> LayoutMismatchError:
    return LayoutMismatchError(
        f"{name}: the reader has {ours!r}, the source has {theirs!r}{why}",
        field=name,
        reader=str(ours),
        source=str(theirs),
    )


def _differences(
    reader: Message, source: Message, path: str = ""
) -> Iterator[tuple[str, object, object]]:
    """Name and both values of each field that differs; of lists of messages, their lengths."""
    for field in reader.DESCRIPTOR.fields:
        name = path + field.name
        ours, theirs = getattr(reader, field.name), getattr(source, field.name)
        if field.message_type is None:
            if ours != theirs:
                yield name, ours, theirs
        elif len(ours) != len(theirs):
            yield name, len(ours), len(theirs)
        else:
            for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
                yield from _differences(one, other, f"{name}[{index}].")

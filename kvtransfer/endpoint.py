"""This process's end of every transfer: its memory, transports and transfer thread."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from diptych.errors import ConfigurationError
from diptych.v1 import common_pb2
from kvtransfer.config import TransferConfig, TransportName
from kvtransfer.inline import InlineTransport
from kvtransfer.memory import PoolMemory
from kvtransfer.scripted import FaultSwitch
from kvtransfer.transfer_thread import TransferThread
from kvtransfer.transport import Transport, TransportError

logger = logging.getLogger(__name__)


class TransferEndpoint:
    """Owns the transfer thread and the transports' agents. Event loop only.

    One per worker process; both roles are built on it.
    """

    def __init__(
        self,
        config: TransferConfig,
        incarnation: str,
        layout: common_pb2.KVLayout,
        memory: PoolMemory,
        switch: FaultSwitch | None = None,
    ) -> None:
        """Use ``open``."""
        self.switch = switch  # a worker that tests may break
        self.config = config
        self.incarnation = incarnation
        self.layout = layout
        self.memory = memory
        self.thread = TransferThread()
        self.transports: dict[str, Transport] = {}  # as configured, most wanted first
        self._num_served = 0
        self._polling = False  # transfer thread only

    @classmethod
    async def open(
        cls,
        config: TransferConfig,
        *,
        incarnation: str,
        layout: common_pb2.KVLayout,
        memory: PoolMemory,
        switch: FaultSwitch | None = None,
    ) -> "TransferEndpoint":
        """Start the thread, create the agents, register the memory (about 0.5 s with nixl).

        ``layout.digest_level`` must equal ``config.digest_level``, and
        ``layout.block_bytes`` the memory's. Raises ConfigurationError: that, or no
        configured transport is available (nixl missing falls back to inline where
        inline is configured too, with a warning).
        """
        for name, ours, theirs in (
            ("digest_level", config.digest_level, layout.digest_level),
            ("block_bytes", memory.block_bytes, layout.block_bytes),
        ):
            if ours != theirs:
                raise ConfigurationError(f"{name}: {ours!r} here, {theirs!r} in the KV layout")
        endpoint = cls(config, incarnation, layout, memory, switch)
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
        """While open, the passive side of one-sided reads is progressed."""
        self._num_served += 1
        if self._num_served == 1:
            self.thread.post(self._start_serving)
        try:
            yield
        finally:
            self._num_served -= 1

    async def rebuild(self) -> None:
        """Destroy and remake the agents: reads that never ended end here, with an error.

        Every connection over them has to be made anew. Raises ConfigurationError.
        """
        for transport in self.transports.values():
            await self.thread.call(transport.rebuild)
        if self.switch is not None:
            self.switch.tear_down()

    async def close(self) -> None:
        """Destroy the agents, stop the thread. After servers and pair tables have stopped."""
        for transport in self.transports.values():
            await self.thread.call(transport.close)
        self.thread.stop()

    async def _add(self, name: TransportName) -> None:
        if name == "inline":
            self.transports[name] = InlineTransport(self.memory)
            return
        from kvtransfer.nixl_transport import NixlTransport  # needs numpy; slow

        try:
            self.transports[name] = await self.thread.call(
                lambda: NixlTransport(self.config, self.incarnation, self.memory)
            )
        except ConfigurationError as error:
            if "inline" not in self.config.transports:
                raise
            logger.warning("nixl is not available, using inline", extra={"error": error.message})

    def _start_serving(self) -> None:
        if not self._polling:
            self._polling = True
            self.thread.poll(self._serve)

    def _serve(self) -> bool:
        """Poller: ends with the last Fetch."""
        for transport in self.transports.values():
            try:
                transport.serve()
            except TransportError as error:  # of one reader: the others go on
                logger.debug("serving reads", extra={"error": str(error)})
        self._polling = self._num_served > 0
        return not self._polling

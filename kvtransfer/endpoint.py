"""This process's end of every transfer: its memory, transports and transfer thread."""

from diptych.v1 import common_pb2
from kvtransfer.config import TransferConfig
from kvtransfer.memory import PoolMemory


class TransferEndpoint:
    """Owns the transfer thread and the transports' agents. Event loop only.

    One per worker process; both roles are built on it.
    """

    config: TransferConfig
    incarnation: str
    layout: common_pb2.KVLayout
    memory: PoolMemory

    @classmethod
    async def open(
        cls,
        config: TransferConfig,
        *,
        incarnation: str,
        layout: common_pb2.KVLayout,
        memory: PoolMemory,
    ) -> "TransferEndpoint":
        """Start the thread, create the agents, register the memory (about 0.5 s with nixl).

        ``layout.digest_level`` must equal ``config.digest_level``, and
        ``layout.block_bytes`` the memory's. Raises ConfigurationError: that, or no
        configured transport is available (nixl missing falls back to inline where
        inline is configured too, with a warning).
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Destroy the agents, stop the thread. After servers and pair tables have stopped."""
        raise NotImplementedError

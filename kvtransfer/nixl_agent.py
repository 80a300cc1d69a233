"""One life of a nixl agent: the library loaded, an agent made, the pool registered.

Everything here runs on the transfer thread, the only one that touches the agent (no
lock, no progress thread: that one busy-polls). nixl is imported when an agent is
first made.
"""

import gc
import logging
import os
import weakref
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from diptych.errors import ConfigurationError
from kvtransfer.config import TransferConfig
from kvtransfer.memory import PoolMemory
from kvtransfer.transport import SourceLostError, TransportError

logger = logging.getLogger(__name__)


class _Library(NamedTuple):
    """What is used of nixl."""

    agent_class: Any
    agent_config_class: Any
    disconnect_error: type[Exception]


def _load(environment: dict[str, str], log_environment: dict[str, str]) -> _Library:
    """Import nixl under the given environment.

    The one place outside configuration that writes ``os.environ``: UCX takes its
    settings from nowhere else, and reads them when an agent is created.
    """
    os.environ.update(environment)
    for name, value in log_environment.items():
        os.environ.setdefault(name, value)
    raise_exceptions = logging.raiseExceptions
    from nixl import _bindings  # slow, and prints: only where it is used
    from nixl._api import nixl_agent, nixl_agent_config

    # Importing it configures logging for the whole process, onto stdout.
    logging.raiseExceptions = raise_exceptions
    nixl_logger = logging.getLogger("nixl")
    nixl_logger.handlers.clear()
    nixl_logger.propagate = True
    nixl_logger.setLevel(logging.WARNING)
    return _Library(nixl_agent, nixl_agent_config, _bindings.nixlRemoteDisconnectError)


def ucx_transports(config: TransferConfig, memory_kind: str) -> tuple[str, ...]:
    """UCX_TLS for these settings: RDMA devices are named ``mlx5_0:1``, others have no colon."""
    if config.nixl_tls is not None:
        return config.nixl_tls
    rdma = any(":" in device for device in config.nixl_net_devices.split(","))
    names = ["cma", *(["rc", "dc", "ud"] if rdma else ["tcp"])]
    if rdma and config.allow_nixl_tcp:
        names.append("tcp")
    if memory_kind == "VRAM":
        names += ["cuda_copy", "cuda_ipc"]
    return tuple(names)


class Dependent(Protocol):
    """Holds handles of the agent, which keep it alive."""

    def drop_handles(self) -> None: ...


class NixlAgent:
    """Owns the library's agent; nobody else keeps a reference to it.

    ``close`` destroys it, which alone stops reads that never end.
    """

    def __init__(self, config: TransferConfig, name: str, memory: PoolMemory) -> None:
        """Raises ConfigurationError: nixl is missing or cannot start."""
        try:
            self._library = _load(
                {
                    "UCX_TLS": ",".join(ucx_transports(config, memory.memory_kind)),
                    "UCX_NET_DEVICES": config.nixl_net_devices,
                    # a cut link is otherwise never noticed
                    "UCX_TCP_USER_TIMEOUT": "5s",
                    "UCX_TCP_KEEPIDLE": "2s",
                    "UCX_TCP_KEEPINTVL": "1s",
                    "UCX_TCP_KEEPCNT": "3",
                },
                {"UCX_LOG_LEVEL": "fatal", "NIXL_LOG_LEVEL": "FATAL"},
            )
        except ImportError as error:
            raise ConfigurationError(f"the nixl transport needs nixl: {error}") from error
        self.raw: Any = None  # None once closed
        self.local_blocks: Any = None  # prepared descriptors of our own blocks
        self.dependents: set[Dependent] = set()  # connected peers, unfinished copies
        try:
            self._open(name, memory)
        except Exception as error:  # the library raises a class of its own per status
            raise ConfigurationError(f"nixl cannot start: {describe(error)}") from error

    def _open(self, name: str, memory: PoolMemory) -> None:
        config = self._library.agent_config_class(enable_prog_thread=False, backends=[])
        raw = self._library.agent_class(name, config)
        raw.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
        pool_bytes = memory.block_bytes * memory.num_blocks
        raw.register_memory(
            [(memory.base_address, pool_bytes, memory.device_id, "")], memory.memory_kind
        )
        self.metadata: bytes = raw.get_agent_metadata()  # after registering, not before
        self.local_blocks = raw.prep_xfer_dlist(
            "NIXL_INIT_AGENT",
            block_rows(
                memory.base_address, memory.block_bytes, memory.num_blocks, memory.device_id
            ),
            memory.memory_kind,
        )
        self.raw = raw

    def serve(self) -> None:
        """Progress the passive side; arriving notifications are not used."""
        if self.raw is None:
            return
        try:
            self.raw.get_new_notifs(["UCX"])
        except Exception as error:
            raise self.translated(error) from error

    def close(self) -> None:
        """Destroy the agent; copies that were unfinished report TransportError next."""
        for dependent in list(self.dependents):
            dependent.drop_handles()
        self.local_blocks = None
        raw, self.raw = self.raw, None
        if raw is None:
            return
        destroyed = weakref.ref(raw)
        del raw
        if destroyed() is not None:  # its reads would go on: something garbage still names it
            gc.collect()
        if destroyed() is not None:
            logger.error("a nixl agent outlives its teardown: its reads may still write")

    def translated(self, error: Exception) -> TransportError:
        """Our error for one of the library's, which loses its traceback.

        The frames in it name the agent, and whoever keeps the error would keep that alive.
        """
        error.__traceback__ = None
        if isinstance(error, self._library.disconnect_error):
            return SourceLostError(f"nixl lost the source: {describe(error)}")
        return TransportError(f"nixl: {describe(error)}")


def block_rows(
    base_address: int, block_bytes: int, num_blocks: int, device_id: int
) -> NDArray[np.uint64]:
    """Descriptors of all blocks: [num_blocks, 3] of (address, bytes, device)."""
    rows = np.empty((num_blocks, 3), dtype=np.uint64)
    rows[:, 0] = base_address + np.arange(num_blocks, dtype=np.uint64) * block_bytes
    rows[:, 1] = block_bytes
    rows[:, 2] = device_id
    return rows


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"

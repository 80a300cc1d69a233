"""Which ways a library that uses UCX may move bytes. Pure.

Facts that shape this: nixl's reads over TCP can crash the process that is read, so they are
refused unless allowed. UCX refuses to start without TCP as the carrier of its small messages
on a machine without RDMA, so TCP cannot simply be excluded there; with RDMA devices it is.
Where a GPU is on the PCI bus, nixl refuses to start without a transport of CUDA's, whatever memory
it is to read (1.5: "does not enable CUDA memory support"), and though a container without the
driver cannot use the GPU; without a driver UCX passes over it. ucxx has no such lane to lose: see
``agents.ucxx``.
"""

from typing import NamedTuple, Protocol

from kvtransfer.config import TransferConfig


class Lanes(NamedTuple):
    """The ways of one library, and whether each of them will do."""

    ucx_tls: tuple[str, ...] = ()  # UCX_TLS; none of a library that does without UCX
    may_use_network: bool = True

    @property
    def has_network_alone(self) -> bool:
        """cuda_copy reaches nobody: it copies between a process's own memories."""
        return set(self.ucx_tls) - {"cuda_copy"} == {"tcp"}


class LanesOf(Protocol):
    """Those of one library, for these settings and blocks in memory of this kind."""

    def __call__(self, config: TransferConfig, memory_kind: str) -> Lanes: ...


def nixl_lanes(config: TransferConfig, memory_kind: str) -> Lanes:
    """Cross-memory attach, and RDMA where there is some: TCP for small messages, or if allowed."""
    tls = config.ucx_tls
    if tls is None:
        names = ["cma", *_network(config)]
        if config.uses_rdma and config.allow_nixl_tcp:
            names.append("tcp")
        names.append("cuda_copy")
        if memory_kind == "VRAM":
            names.append("cuda_ipc")
        tls = tuple(names)
    return Lanes(tls, config.allow_nixl_tcp or not {"tcp", "all"} & set(tls))


def ucxx_lanes(config: TransferConfig, memory_kind: str) -> Lanes:
    """A network, always: its messages do not go through cross-memory attach."""
    return Lanes(_network(config) if config.ucx_tls is None else config.ucx_tls)


def _network(config: TransferConfig) -> tuple[str, ...]:
    return ("rc", "dc", "ud") if config.uses_rdma else ("tcp",)

"""Settings of the transfer: which transports, how they are confined, how much is proven."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

TransportName = Literal["nixl", "ucxx", "staged", "inline"]  # transports.choice has what each is
DigestLevel = Literal["full", "sampled", "off"]

MAX_PROBE_BLOCKS = 256
PROBES_AT_ONCE = 4  # more wait for their turn


class TransferConfig(BaseModel):
    """How a worker moves KV blocks. Frozen; built once at start."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    transports: tuple[TransportName, ...] = Field(
        ("nixl", "staged", "inline"),
        min_length=1,
        description="Transports this worker may use, most wanted first. A pair that cannot be "
        "proven over one falls back to the next, visibly; list one only to forbid that. nixl reads "
        "directly; staged is nixl too, through host memory beside a pool that is on a device, and "
        "not used between two that are not. ucxx needs the extra ucxx.",
    )
    staging_bytes: int = Field(
        64 * 2**20,
        ge=4096,
        description="Host memory beside a pool that is on a device, pinned, through which staged "
        "moves blocks, B; no more of them lie there at a time.",
    )
    digest_level: DigestLevel = Field(
        "full",
        description="Digests of announced blocks: full, sampled (one line of 64 bytes in 2 KiB: "
        "finds every stale block and torn page, one flipped bit in 32) or off. Both pools must "
        "agree; inline always carries and checks them.",
    )
    allow_faults: bool = Field(
        False,
        description="Let tests break transfers: faults, the Faults service, nixl over TCP. Said "
        "loudly in the log, on Watch and by a metric. Never for service.",
    )
    faults: str = Field(
        "",
        description="Faults in force from the start: a JSON list of rules, see "
        "kvtransfer/testing/faults.py. Needs allow_faults.",
    )
    allow_nixl_tcp: bool = Field(
        False,
        description="Let nixl read over plain TCP. Off, because a reader that dies can crash "
        "the process it reads from; inline is faster as well. Needs allow_faults.",
    )
    ucx_net_devices: str = Field(
        "lo",
        description="Network devices that nixl and ucxx may use and listen on "
        "(UCX_NET_DEVICES), comma-separated.",
    )
    ucx_tls: tuple[str, ...] | None = Field(
        None,
        description="UCX transports that nixl and ucxx may use (UCX_TLS). Unset: for nixl "
        "cross-memory attach, what its small messages need and CUDA's, for ucxx TCP; RDMA where "
        "ucx_net_devices names such devices. nixl needs cuda_copy among them in a machine with an "
        "NVIDIA GPU, also for host memory.",
    )
    nixl_process: Literal["child", "inside"] = Field(
        "child",
        description="Where nixl runs. child: in a process of its own beside the worker, so that a "
        "crash or a hang of the library costs the reads under way and nothing else (a pool that "
        "no other process can map is read inside). inside: in the worker itself.",
    )
    agent_answer_s: float = Field(
        2.0,
        gt=0,
        description="A nixl or ucxx process that has not answered for this long is ended and "
        "another one started, s.",
    )
    probe_blocks: int = Field(
        4,
        ge=1,
        le=MAX_PROBE_BLOCKS,
        description="Random scratch blocks moved to prove and measure a pair. A worker has four "
        "times as many behind its pool, which is also the most that another may ask of it.",
    )
    max_read_bytes: int = Field(
        16 * 2**20, ge=4096, description="Bytes of one read at the most; longer ones are split."
    )
    inline_message_bytes: int = Field(
        2**20,
        ge=4096,
        le=8 * 2**20,
        description="Payload bytes of one Data message of the inline transport.",
    )
    reconnect_min_s: float = Field(0.1, gt=0, description="First wait before a pair is retried, s.")
    reconnect_max_s: float = Field(5.0, gt=0, description="Longest wait between retries, s.")
    reprove_s: float = Field(
        30.0,
        gt=0,
        description="How often a pair that is proven over a less wanted transport tries the better "
        "ones again, and how long a transport's library that cannot start is left alone, s.",
    )
    quarantine_max_s: float = Field(
        10.0,
        gt=0,
        description="A read unfinished for this long after its pull ended has its transport "
        "agent torn down to reclaim the blocks, s.",
    )
    quarantine_max_ratio: float = Field(
        0.05,
        gt=0,
        le=1,
        description="So do reads unfinished for a second that hold more than this part of all "
        "blocks, 0 to 1.",
    )

    @property
    def num_scratch_blocks(self) -> int:
        """Blocks that a worker's memory has beyond its pool, for the probes at work at once."""
        return PROBES_AT_ONCE * self.probe_blocks

    @property
    def uses_rdma(self) -> bool:
        """Whether RDMA devices are named: they have a port, ``mlx5_0:1``, others have none."""
        return any(":" in device for device in self.ucx_net_devices.split(","))

    @model_validator(mode="after")
    def _check_allowed(self) -> Self:
        for name in ("faults", "allow_nixl_tcp"):
            if getattr(self, name) and not self.allow_faults:
                raise ValueError(f"{name} breaks transfers: it needs allow_faults as well")
        return self

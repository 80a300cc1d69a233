"""How long processes of the cluster wait for each other: the timers that can be set, in seconds.

Not here: what the transfer waits for by itself (``kvtransfer.config``: agents, quarantine), how
a router's clients are kept alive (``rpc.server.PublicEdge``), and fixed bounds, which stand
beside what waits.
"""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

GrpcSeconds = Annotated[float, Field(ge=0.001, le=2_000_000, allow_inf_nan=False)]
"""A time that gRPC takes as an option: whole milliseconds, at least one, in 31 bits."""


class Timers(BaseModel):
    """How long each side waits for what. All settable, all in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    heartbeat_s: float = Field(1.0, gt=0, description="Interval between heartbeats, s.")
    lost_peer_s: float = Field(
        4.5,
        gt=0,
        description="Without a heartbeat, or a due engine step, for this long a peer is lost, and "
        "so is a lease that does not let its reader in; a worker ends by itself when a step takes "
        "this much longer than twice its prediction. At least two heartbeats, s.",
    )
    keepalive_s: GrpcSeconds = Field(1.0, description="Interval between HTTP/2 pings, s.")
    keepalive_answer_s: GrpcSeconds = Field(
        2.0, description="A connection with a ping unanswered for this long is broken, s."
    )
    accept_s: float = Field(
        0.5, gt=0, description="A worker accepts, reserves or refuses within this, s."
    )
    read_progress_s: float = Field(
        5.0,
        gt=0,
        description="A pull with no progress for this long has failed, and a worker whose "
        "transfer thread is at one thing for this long is not ready, s.",
    )
    confirm_s: float = Field(2.0, gt=0, description="A source answers Confirm within this, s.")
    unbound_lease_s: float = Field(
        1.0,
        gt=0,
        description="A finished lease that no reader was granted is dropped after this, s.",
    )
    no_worker_s: float = Field(
        30.0,
        gt=0,
        description="A request waits this long for a placement, then NO_WORKER, or QUEUE_TIMEOUT "
        "where it waited behind others, s.",
    )
    sequence_progress_s: float = Field(
        60.0,
        gt=0,
        description="A sequence that decodes, or has its first token and is handed over, without a "
        "further one for this long, up to twice as long, is moved to another worker; not one of a "
        "batch that sits out, s.",
    )
    unsent_s: float = Field(
        5.0, gt=0, description="A stream that cannot send for this long is broken, s."
    )
    lame_duck_s: float = Field(
        0.25,
        ge=0,
        description="On SIGTERM, a router that says NOT_SERVING goes on until no request came for "
        "this long, as whoever balances load looks away; then its connections get GOAWAY, s.",
    )
    leave_s: float = Field(
        35.0,
        ge=0,
        description="It goes on for this long at the most, in which clients that connect once and "
        "for all meet the router's max_connection_age_s; then it refuses them for lame_duck_s, s.",
    )
    client_write_s: float = Field(
        30.0, gt=0, description="A client that takes no response for this long is given up, s."
    )
    drain_s: float = Field(
        20.0, gt=0, description="On SIGTERM, running work may finish within this, s."
    )

    @model_validator(mode="after")
    def _check_heartbeats(self) -> Self:
        """One may be late by as much again."""
        if self.lost_peer_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"lost_peer_s ({self.lost_peer_s}) has to be at least twice heartbeat_s "
                f"({self.heartbeat_s}), or peers that are well are taken for lost"
            )
        return self

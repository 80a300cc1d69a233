"""What happens to a request: its machine's only input. Plain data, made from wire messages in
:mod:`router.request.worker_messages` or by the session that owns the machine.

Events of a lease or a reservation carry its ``sequence_id``; those of one that is no longer
held are ignored.
"""

from collections.abc import Sequence
from typing import NamedTuple

from diptych.errors import DiptychError
from diptych.token_logprobs import TokenLogprobs
from diptych.v1 import common_pb2
from router.request.prompt_told import ToldPart


class Begin(NamedTuple):
    """The request was admitted and wants its first placement. First event, once.

    ``front``: another choice of it was placed before.
    """

    front: bool = False


class Offered(NamedTuple):
    """The queue offers its turn; ``room_made``: another request ended, so the pause after a
    refusal is over early."""

    room_made: bool


class TurnedAway(NamedTuple):
    """The queue is full and this request may not wait in it."""

    error: DiptychError


class Tick(NamedTuple):
    """The machine's ``wake_at_s`` has come (or not yet: then nothing happens)."""


class Cancelled(NamedTuple):
    """The client is gone: everything is freed, nothing is answered."""


class ClientTooSlow(NamedTuple):
    """The client reads too slowly; ``why`` says what was seen."""

    why: str


class Accepted(NamedTuple):
    """The prefill worker holds the lease's blocks; ``num_cached_tokens`` it had computed before."""

    sequence_id: int
    num_cached_tokens: int


class FirstToken(NamedTuple):
    """The prefill worker sampled the token at ``position``, counted from the prompt's start."""

    sequence_id: int
    token_id: int
    position: int
    margin: float | None
    finish_reason: int  # common_pb2.FinishReason; 0: the sequence goes on
    logprobs: TokenLogprobs | None = None


class PromptTold(NamedTuple):
    """A part of what the lease was asked to tell of the prompt."""

    sequence_id: int
    part: ToldPart


class Granted(NamedTuple):
    """The ticket of that grant is valid: its reader may pull."""

    sequence_id: int
    grant_id: int


class LeaseEnded(NamedTuple):
    """The lease's stream ended, or its worker is lost; nothing of it is held."""

    sequence_id: int
    error: DiptychError


class Reserved(NamedTuple):
    """The decode worker holds the sequence's blocks, with this many tokens' KV in them."""

    sequence_id: int
    num_cached_tokens: int


class Proven(NamedTuple):
    """The pull of that Bind landed whole and was confirmed."""

    sequence_id: int
    bind_id: int
    stats: common_pb2.TransferStats


class PullFailed(NamedTuple):
    """The pull of that Bind ended without proof; the reservation stands."""

    sequence_id: int
    bind_id: int
    reason: int  # decode_pb2.PullFailure
    message: str


class Tokens(NamedTuple):
    """New tokens of the running sequence; ``position`` of the first, from the prompt's start."""

    sequence_id: int
    position: int
    token_ids: Sequence[int]
    margins: Sequence[float]  # as many as tokens, or none
    logprobs: Sequence[TokenLogprobs] = ()  # as many as tokens, or none


class Ended(NamedTuple):
    """The decode worker's last word on the sequence: it finished, failed or was refused."""

    sequence_id: int
    finish_reason: int  # common_pb2.FinishReason; 0: it did not finish
    num_preemptions: int
    error: DiptychError | None  # why it did not finish, if the worker said
    num_computed_prompt_tokens: int | None = None  # by the worker; None: it does not say


class ReservationLost(NamedTuple):
    """The stream to the decode worker broke; nothing of the reservation is held."""

    sequence_id: int
    message: str


Event = (
    Begin
    | Offered
    | TurnedAway
    | Tick
    | Cancelled
    | ClientTooSlow
    | Accepted
    | FirstToken
    | PromptTold
    | Granted
    | LeaseEnded
    | Reserved
    | Proven
    | PullFailed
    | Tokens
    | Ended
    | ReservationLost
)

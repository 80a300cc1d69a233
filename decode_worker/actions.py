"""What is decided for a router's sequences: messages to send, pulls to run and stop. Plain data."""

from typing import NamedTuple, Protocol, cast

from decode_worker.outbox import NewToken
from diptych.errors import DiptychError
from diptych.finish_reason import FinishReason
from diptych.rpc.status import to_failure
from diptych.v1 import common_pb2, decode_pb2
from kvtransfer.reader.pull_machine import PullResult


class PreparedPull(Protocol):
    """A pull that can be given up at once (kvtransfer.reader.lease_pull.LeasePull)."""

    async def run(self) -> PullResult:
        """Pull until proven. Raises PullError."""
        ...

    def abandon(self) -> frozenset[int]:
        """Post no more reads; the local blocks that posted ones may still write."""
        ...


class SendEvent(NamedTuple):
    """Send this to the router."""

    event: decode_pb2.DecodeEvent


class SendTokens(NamedTuple):
    """Send one step's tokens to the router."""

    tokens: tuple[NewToken, ...]


class RunPull(NamedTuple):
    """Run the pull; report by ``pull_proven`` or ``pull_failed`` of RouterSequences."""

    sequence_id: int
    bind_id: int
    pull: PreparedPull


class StopPull(NamedTuple):
    """The pull was abandoned: cancel its task. No report is wanted."""

    sequence_id: int
    bind_id: int


Action = SendEvent | SendTokens | RunPull | StopPull


def send_reserved(sequence_id: int, num_cached_tokens: int) -> SendEvent:
    """Blocks are held."""
    reserved = decode_pb2.Reserved(sequence_id=sequence_id, num_cached_tokens=num_cached_tokens)
    return SendEvent(decode_pb2.DecodeEvent(reserved=reserved))


def send_proven(sequence_id: int, bind_id: int, stats: common_pb2.TransferStats) -> SendEvent:
    """The KV landed whole and was confirmed."""
    proven = decode_pb2.Proven(sequence_id=sequence_id, bind_id=bind_id, stats=stats)
    return SendEvent(decode_pb2.DecodeEvent(proven=proven))


def send_pull_failed(
    sequence_id: int, bind_id: int, reason: decode_pb2.PullFailure, message: str
) -> SendEvent:
    """The pull ended without proof; the reservation stands."""
    failed = decode_pb2.PullFailed(
        sequence_id=sequence_id, bind_id=bind_id, reason=reason, message=message
    )
    return SendEvent(decode_pb2.DecodeEvent(pull_failed=failed))


def send_ended(
    sequence_id: int,
    *,
    finish_reason: FinishReason | None = None,
    error: DiptychError | None = None,
    num_preemptions: int = 0,
    num_computed_tokens: int = 0,
    num_computed_prompt_tokens: int = 0,
) -> SendEvent:
    """The last word on a sequence: finished, failed, or (neither) released."""
    ended = decode_pb2.Ended(
        sequence_id=sequence_id,
        failure=None if error is None else to_failure(error),
        num_preemptions=num_preemptions,
        num_computed_tokens=num_computed_tokens,
        num_computed_prompt_tokens=num_computed_prompt_tokens,
    )
    if finish_reason is not None:
        ended.finish_reason = cast(common_pb2.FinishReason, int(finish_reason))
    return SendEvent(decode_pb2.DecodeEvent(ended=ended))

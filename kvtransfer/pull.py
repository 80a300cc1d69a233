"""One pull as its reader sees it: a pure state machine from Open to proven."""

from dataclasses import dataclass, field

from diptych.errors import DiptychError
from diptych.v1 import common_pb2, decode_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class PullRequest:
    """What to pull and where to put it."""

    source_address: str
    source_incarnation: str
    ticket: bytes = field(repr=False)
    first_missing_token: int  # a multiple of the block size
    num_tokens: int  # in the whole sequence; pulled are first_missing_token..num_tokens
    local_block_ids: tuple[int, ...]  # for tokens from first_missing_token on; more are ignored


@dataclass(frozen=True, slots=True, kw_only=True)
class PullResult:
    """A proven pull."""

    stats: common_pb2.TransferStats


class PullError(DiptychError):
    """A pull ended without proof; ``failure`` is what Decode.PullFailed reports.

    ``unfinished_block_ids`` are local blocks that a posted read may still write:
    they were passed to ``on_quarantine`` before this was raised.
    """

    def __init__(
        self,
        failure: decode_pb2.PullFailure,
        message: str,
        unfinished_block_ids: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(message)
        self.failure = failure
        self.unfinished_block_ids = unfinished_block_ids

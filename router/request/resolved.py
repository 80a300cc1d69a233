"""A request that was checked and in which nothing is open any more."""

from dataclasses import dataclass

from diptych.sampling_params import SamplingParams
from router.request.emitted_tokens import RequestShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRequest:
    """What workers and the answer need."""

    shape: RequestShape
    sampling: SamplingParams  # as workers get it
    stop: tuple[str, ...] = ()  # the router's own affair, as is the next
    includes_stop: bool = False  # the text ends with what ended the output
    cache_salt: bytes = b""
    emitted_token_ids: tuple[int, ...] = ()  # the client has these already

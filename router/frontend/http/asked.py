"""What a body asks for: the request that the generator gets, and how its answer is to be sent."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Final

from pydantic import BeforeValidator, Field

from diptych.errors import InvalidRequestError
from diptych.request_class import RequestClass, read_class
from diptych.service_level import ServiceLevel
from router.frontend.http.body import StrictModel
from router.frontend.http.prompt_form import PromptWish
from router.generation.request import GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What is known of a request beside its body."""

    request_id: str
    num_bytes: int
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A body that was understood, but not checked against the model."""

    request: GenerationRequest
    is_stream: bool
    includes_usage: bool
    """Whether a stream ends with its usage; an answer in one piece always has it."""
    counts_along: bool
    """Whether each piece of a stream with usage has the counts so far."""
    tells_timing: bool
    """Whether the answer says where its time went."""
    prompt: PromptWish | None
    """What to tell of the prompt; None: nothing."""
    names: Mapping[str, str]
    """How to call the request's fields, see :func:`router.frontend.field_names.renamed`."""
    others: tuple["Asked", ...] = ()
    """What is asked of further prompts, each of which has choices of its own."""
    repeated: Mapping[str, object] = field(default_factory=dict)
    """What the answer says again of what was asked, under the names of its own form."""


class StreamOptions(StrictModel):
    """How a stream is to be."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def _read_priority(value: object) -> RequestClass | None:
    """The class of that name; other servers' number for no priority says nothing."""
    if value is None or (value == 0 and isinstance(value, int) and not isinstance(value, bool)):
        return None
    return read_class(value)


class LevelFields(StrictModel):
    """The members of a body that say a request's service level."""

    priority: Annotated[RequestClass | None, BeforeValidator(_read_priority)] = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None

    @property
    def level(self) -> ServiceLevel:
        """The same as plain data."""
        return ServiceLevel(**{name: getattr(self, name) for name in ServiceLevel._fields})


ModelName = Annotated[str, Field(min_length=1)]
"""As a body has to say it. Behind HTTP an empty one stands for whatever is served."""


class GenerationBody(LevelFields):
    """What completions and chats have in common, beside the sampling parameters."""

    model: ModelName
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    return_timing: bool | None = None


COMMON_NAMES: Final[Mapping[str, str]] = {"sampling.": "", "request_id": "x-request-id"}
"""Fields of a GenerationRequest that have other names here."""


def asked_of(
    body: GenerationBody,
    request: GenerationRequest,
    names: Mapping[str, str],
    prompt: PromptWish | None = None,
) -> Asked:
    """What follows from the members that all bodies have. Raises InvalidRequestError.

    ``prompt``: what else than ``prompt_logprobs`` is to be told of it.
    """
    num_top = request.sampling.prompt_logprobs
    if num_top is not None:
        if body.stream:
            raise InvalidRequestError("is only for answers in one piece", field="prompt_logprobs")
        prompt = replace(prompt or PromptWish(), num_top=num_top)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("is only for streams", field="stream_options")
    options = body.stream_options or StreamOptions()
    counts_along = bool(options.include_usage and options.continuous_usage_stats)
    sampling = request.sampling
    if body.stream and sampling.num_drawn > sampling.num_choices:
        raise InvalidRequestError("is only for answers in one piece", field="best_of")
    if sampling.num_choices > 1:
        if prompt is not None and prompt.echoes:
            raise InvalidRequestError("is for one choice", field="echo")
        if counts_along:
            raise InvalidRequestError(
                "is for one choice", field="stream_options.continuous_usage_stats"
            )
    return Asked(
        request=replace(request, return_prompt_token_ids=counts_along or prompt is not None),
        prompt=prompt,
        is_stream=bool(body.stream),
        includes_usage=bool(options.include_usage),
        counts_along=counts_along,
        tells_timing=bool(body.return_timing),
        names={**names, **COMMON_NAMES},
    )

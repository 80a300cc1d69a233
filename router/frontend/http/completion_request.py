"""The body of ``/v1/completions`` as a request for the generator. Pure."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Final

from pydantic import FailFast, Field, TypeAdapter, ValidationError

from diptych.errors import InvalidRequestError
from router.frontend.http import unserved
from router.frontend.http.asked import (
    Asked,
    Envelope,
    GenerationBody,
    asked_of,
)
from router.frontend.http.body import refusal, validated
from router.frontend.http.constraint_fields import read_constraint
from router.frontend.http.prompt_form import PromptWish
from router.frontend.http.sampling_fields import read_sampling
from router.frontend.validation import check_room
from router.generation.request import GenerationRequest, TextPrompt, TokenPrompt

DEFAULT_MAX_TOKENS: Final = 16  # as OpenAI's; a chat gets what the context leaves
PROMPT_NAMES: Final = {"tokens.ids": "prompt", "tokens": "prompt", "text": "prompt"}

_TOKEN_IDS: Final = TypeAdapter(
    Annotated[list[Annotated[int, Field(strict=True, ge=0, le=2**32 - 1)]], FailFast()]
)


class _CompletionBody(GenerationBody):
    """A completion's other members of its own."""

    echo: bool | None = None


def read_completion(content: Mapping[str, object], envelope: Envelope) -> Asked:
    """What a client asks for. Raises InvalidRequestError."""
    body = validated(_CompletionBody, content)
    unserved.refuse(content, unserved.OF_COMPLETION)
    is_all = bool(body.echo) and content.get("max_tokens") == 0
    if is_all:
        content = {**content, "max_tokens": 1}  # which is drawn, and left out
    said = read_constraint(content)
    request = GenerationRequest(
        prompt=read_prompt(content.get("prompt"), envelope.max_model_len),
        sampling=read_sampling(
            content,
            max_tokens=DEFAULT_MAX_TOKENS,
            constraint=None if said is None else said.constraint,
        ),
        model=body.model,
        request_id=envelope.request_id,
        cache_salt=body.cache_salt or "",
        level=body.level,
        num_bytes=envelope.num_bytes,
    )
    names = {**PROMPT_NAMES, **(said.names if said else {})}
    asked = asked_of(body, request, names, _wish(request, is_all) if body.echo else None)
    return _with_echoed_logprobs(asked) if body.echo else asked


def _wish(request: GenerationRequest, is_all: bool) -> PromptWish:
    text = request.prompt.text if isinstance(request.prompt, TextPrompt) else None
    return PromptWish(echoes=True, is_all=is_all, text=text)


def _with_echoed_logprobs(asked: Asked) -> Asked:
    """Who wants those of an echoed answer wants those of the prompt."""
    sampling = asked.request.sampling
    if sampling.logprobs is None:
        return asked
    num_top = max(sampling.logprobs, sampling.prompt_logprobs or 0)
    sampling = replace(sampling, prompt_logprobs=num_top)
    return replace(asked, request=replace(asked.request, sampling=sampling))


def read_prompt(
    value: object, max_model_len: int, field: str = "prompt"
) -> TextPrompt | TokenPrompt:
    """One text or list of token ids, or a list of one of these.

    ``field`` is its name in the body. A list that is too long for the model is refused
    before anything looks at its items. Raises InvalidRequestError.
    """
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise InvalidRequestError("several prompts are not supported yet", field=field)
        value = value[0]
    if isinstance(value, str):
        return TextPrompt(value)
    if not isinstance(value, list):
        wanted = "is required" if value is None else "should be a text or a list of token ids"
        raise InvalidRequestError(wanted, field=field)
    check_room(len(value), max_model_len, field)
    try:
        return TokenPrompt(_TOKEN_IDS.validate_python(value))
    except ValidationError as error:
        raise refusal(error, field) from None

"""The body of ``/v1/completions`` as a request for the generator. Pure."""

from collections.abc import Mapping, Sequence
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
from router.frontend.validation import MAX_REQUEST_ID_CHARACTERS, CheckLength, check_room
from router.generation.request import GenerationRequest, TextPrompt, TokenPrompt

DEFAULT_MAX_TOKENS: Final = 16  # as OpenAI's; a chat gets what the context leaves
MAX_PROMPT_CHOICES: Final = 128  # of all prompts of one body together
_MAX_ID_BEGIN: Final = MAX_REQUEST_ID_CHARACTERS - 4
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
    most = content.get("max_tokens")
    is_all = bool(body.echo) and type(most) is int and most == 0
    if is_all:
        content = {**content, "max_tokens": 1}  # which is drawn, and left out
    said = read_constraint(content)
    prompts = read_prompts(content.get("prompt"), envelope.max_model_len)
    request = GenerationRequest(
        prompt=prompts[0],
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
    asked = asked_of(body, request, names, _wish(prompts[0], is_all) if body.echo else None)
    if body.echo:
        asked = _with_echoed_logprobs(asked)
    return asked if len(prompts) == 1 else _of_several(asked, prompts)


def _of_several(asked: Asked, prompts: Sequence[TextPrompt | TokenPrompt]) -> Asked:
    """The same of each prompt; refused is what one of them alone could be told."""
    if asked.tells_timing:
        raise InvalidRequestError("is for one prompt", field="return_timing")
    if asked.counts_along:
        raise InvalidRequestError(
            "is for one prompt", field="stream_options.continuous_usage_stats"
        )
    request = asked.request
    num_choices = len(prompts) * request.sampling.num_drawn
    if num_choices > MAX_PROMPT_CHOICES:
        raise InvalidRequestError(
            f"{len(prompts)} prompts make {num_choices} choices, more than {MAX_PROMPT_CHOICES}: "
            "send them in several requests, or as a batch",
            field="prompt",
        )
    each = [
        replace(
            asked,
            request=replace(
                request,
                prompt=prompt,
                request_id=f"{request.request_id[:_MAX_ID_BEGIN]}-{index}",
            ),
            prompt=None if asked.prompt is None else replace(asked.prompt, text=_text_of(prompt)),
            names={**asked.names, **dict.fromkeys(PROMPT_NAMES, f"prompt[{index}]")},
        )
        for index, prompt in enumerate(prompts)
    ]
    return replace(each[0], others=tuple(each[1:]))


def _wish(prompt: TextPrompt | TokenPrompt, is_all: bool) -> PromptWish:
    return PromptWish(echoes=True, is_all=is_all, text=_text_of(prompt))


def _text_of(prompt: TextPrompt | TokenPrompt) -> str | None:
    return prompt.text if isinstance(prompt, TextPrompt) else None


def _with_echoed_logprobs(asked: Asked) -> Asked:
    """Who wants those of an echoed answer wants those of the prompt."""
    sampling, wish = asked.request.sampling, asked.prompt
    if sampling.logprobs is None or wish is None:
        return asked
    num_top, names = sampling.logprobs, asked.names
    wish = replace(wish, num_echoed=num_top)
    if sampling.prompt_logprobs is None:  # nobody said that
        names = {"sampling.prompt_logprobs": "logprobs", **names}
    else:
        num_top = max(num_top, sampling.prompt_logprobs)
    request = replace(asked.request, sampling=replace(sampling, prompt_logprobs=num_top))
    return replace(asked, request=request, prompt=wish, names=names)


def read_prompts(value: object, max_model_len: int) -> Sequence[TextPrompt | TokenPrompt]:
    """One prompt, or all of a list of them. Raises InvalidRequestError."""
    if isinstance(value, list) and len(value) > 1 and isinstance(value[0], str | list):
        if len(value) > MAX_PROMPT_CHOICES:
            raise InvalidRequestError(
                f"has {len(value)} prompts, more than {MAX_PROMPT_CHOICES}", field="prompt"
            )
        for index, each in enumerate(value):
            if not isinstance(each, str | list):
                raise InvalidRequestError(
                    "should be a text or a list of token ids", field=f"prompt[{index}]"
                )
        return [
            read_prompt([each], max_model_len, f"prompt[{index}]")
            for index, each in enumerate(value)
        ]
    return [read_prompt(value, max_model_len)]


def read_prompt(
    value: object,
    max_model_len: int,
    field: str = "prompt",
    check_length: CheckLength = check_room,
) -> TextPrompt | TokenPrompt:
    """One text or list of token ids, or a list of one of these.

    ``field`` is its name in the body. A list that is too long, by ``check_length``, is refused
    before anything looks at its items. Raises InvalidRequestError.
    """
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise InvalidRequestError("has to be one prompt", field=field)
        value = value[0]
    if isinstance(value, str):
        return TextPrompt(value)
    if not isinstance(value, list):
        wanted = "is required" if value is None else "should be a text or a list of token ids"
        raise InvalidRequestError(wanted, field=field)
    check_length(len(value), max_model_len, field)
    try:
        return TokenPrompt(_TOKEN_IDS.validate_python(value))
    except ValidationError as error:
        raise refusal(error, field) from None

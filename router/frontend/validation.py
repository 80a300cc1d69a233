"""A client's request, checked and resolved: a bad one never reaches a worker. Pure.

Every refusal is an InvalidRequestError with the path of the field. ``check`` looks
at lengths before it looks at what they are the lengths of, so a request costs
next to nothing until it is known to fit; ``tokenize`` may take long and may run in
a thread; ``resolve`` needs the context length that the workers have.
"""

from collections.abc import Sequence
from typing import NamedTuple

from diptych.errors import InvalidRequestError
from diptych.sampling_params import OPTIONS, SamplingOptions, SamplingParams, check_options
from diptych.text.tokenizer import Tokenizer
from router.generation.request import ChatPrompt, GenerationRequest, TextPrompt, TokenPrompt
from router.request.emitted_tokens import RequestShape
from router.request.resolved import ResolvedRequest

MAX_REQUEST_ID_CHARACTERS = 128
MAX_SALT_BYTES = 64
MAX_TOOL_CALL_ID_CHARACTERS = 256
MAX_ROLE_CHARACTERS = 64


class ModelFacts(NamedTuple):
    """What requests are checked against."""

    vocab_size: int
    max_model_len: int  # the model's, or less where the workers have less
    eos_token_ids: frozenset[int]
    recommended: SamplingOptions  # by the model's makers


def check(request: GenerationRequest, facts: ModelFacts) -> None:
    """Check all that needs no tokenising. Raises InvalidRequestError."""
    check_options(request.sampling, "sampling")
    _check_ids(request.sampling.stop_token_ids, facts.vocab_size, "sampling.stop_token_ids")
    if request.request_id:
        _check_request_id(request.request_id)
    if len(request.cache_salt) > MAX_SALT_BYTES or len(request.cache_salt.encode()) > (
        MAX_SALT_BYTES
    ):
        raise InvalidRequestError(f"longer than {MAX_SALT_BYTES} bytes", field="cache_salt")
    match request.prompt:
        case TextPrompt(text):
            if not text:
                raise InvalidRequestError("is empty", field="text")
        case TokenPrompt(token_ids):
            _check_token_prompt(token_ids, facts)
        case ChatPrompt():
            _check_chat(request.prompt)
    _check_room(len(request.emitted_token_ids), facts, "emitted_token_ids")
    _check_ids(request.emitted_token_ids, facts.vocab_size, "emitted_token_ids")


def tokenize(request: GenerationRequest, tokenizer: Tokenizer, max_model_len: int) -> list[int]:
    """The prompt's token ids. Raises InvalidRequestError, for hopeless lengths at once."""
    match request.prompt:
        case TokenPrompt(token_ids):
            return list(token_ids)
        case TextPrompt(text):
            add_special = True
        case ChatPrompt(messages, arguments):
            text, add_special = tokenizer.render_chat(messages, arguments), False
    _check_text(text, request.prompt_field)
    at_least = tokenizer.min_tokens(text)
    if at_least >= max_model_len:
        raise InvalidRequestError(
            f"has {at_least} tokens or more; at most {max_model_len - 1} leave room for an answer",
            field=request.prompt_field,
        )
    token_ids = tokenizer.encode(text, add_special=add_special)
    if not token_ids:
        raise InvalidRequestError("has no tokens", field=request.prompt_field)
    return token_ids


def resolve(
    request: GenerationRequest, prompt_ids: Sequence[int], facts: ModelFacts, *, drawn_seed: int
) -> ResolvedRequest:
    """Fill in what the client left open, within the context length.

    What the client did not say the model's makers do, then the defaults;
    ``drawn_seed`` is used if the client gave none. Raises InvalidRequestError.
    """
    _check_room(len(prompt_ids), facts, request.prompt_field)
    max_tokens = _max_tokens(request, len(prompt_ids), facts.max_model_len)
    given = request.sampling
    temperature = _chosen("temperature", given, facts.recommended)
    if request.emitted_token_ids and given.seed is None and temperature > 0:
        raise InvalidRequestError(
            "is needed to continue a sampled output: that of its Started", field="sampling.seed"
        )
    stop_token_ids = frozenset(given.stop_token_ids)
    if not given.ignore_eos:
        stop_token_ids |= facts.eos_token_ids
    _check_goes_on(request.emitted_token_ids, stop_token_ids, given.min_tokens)
    sampling = SamplingParams(
        temperature=temperature,
        top_k=int(_chosen("top_k", given, facts.recommended)),
        top_p=_chosen("top_p", given, facts.recommended),
        seed=drawn_seed if given.seed is None else given.seed,
        max_tokens=max_tokens,
        min_tokens=given.min_tokens,
        stop_token_ids=stop_token_ids,
        return_margins=given.return_margins,
    )
    return ResolvedRequest(
        shape=RequestShape(
            prompt_ids=tuple(prompt_ids),
            max_tokens=max_tokens,
            min_tokens=given.min_tokens,
            stop_token_ids=stop_token_ids,
        ),
        sampling=sampling,
        stop=given.stop,
        cache_salt=request.cache_salt.encode(),
        emitted_token_ids=tuple(request.emitted_token_ids),
    )


def _chosen(name: str, given: SamplingOptions, recommended: SamplingOptions) -> float:
    for options in (given, recommended):
        value: float | None = getattr(options, name)
        if value is not None:
            return value
    default = OPTIONS[name].default
    assert default is not None
    return default


def _max_tokens(request: GenerationRequest, num_prompt: int, max_model_len: int) -> int:
    given, room = request.sampling, max_model_len - num_prompt
    max_tokens = room if given.max_tokens is None else given.max_tokens
    if max_tokens > room:
        raise InvalidRequestError(
            f"{max_tokens} tokens after a prompt of {num_prompt} exceed the context "
            f"of {max_model_len}",
            field="sampling.max_tokens",
        )
    if given.min_tokens > max_tokens:
        raise InvalidRequestError(
            f"{given.min_tokens} is more than max_tokens, {max_tokens}",
            field="sampling.min_tokens",
        )
    if len(request.emitted_token_ids) > max_tokens:
        raise InvalidRequestError(
            f"has {len(request.emitted_token_ids)} tokens, more than max_tokens, {max_tokens}",
            field="emitted_token_ids",
        )
    return max_tokens


def _check_goes_on(
    emitted_token_ids: Sequence[int], stop_token_ids: frozenset[int], min_tokens: int
) -> None:
    """No output has tokens after one that ended it. Stop strings are looked for with the text."""
    for num_before in range(max(1, min_tokens), len(emitted_token_ids)):
        if emitted_token_ids[num_before - 1] in stop_token_ids:
            raise InvalidRequestError(
                "comes after a stop token, which ended the output",
                field=f"emitted_token_ids[{num_before}]",
            )


def _check_token_prompt(token_ids: Sequence[int], facts: ModelFacts) -> None:
    if not token_ids:
        raise InvalidRequestError("is empty", field="tokens")
    _check_room(len(token_ids), facts, "tokens")
    _check_ids(token_ids, facts.vocab_size, "tokens.ids")


def _check_text(text: str, field: str) -> None:
    """A template may join what was text into what is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"has half of a character, U+{ord(text[error.start]):04X}", field=field
        ) from None


def _check_chat(chat: ChatPrompt) -> None:
    if not chat.messages:
        raise InvalidRequestError("is empty", field="chat.messages")
    for index, message in enumerate(chat.messages):
        if not message.role:
            raise InvalidRequestError("is empty", field=f"chat.messages[{index}].role")
        if len(message.role) > MAX_ROLE_CHARACTERS:
            raise InvalidRequestError(
                f"longer than {MAX_ROLE_CHARACTERS} characters",
                field=f"chat.messages[{index}].role",
            )
        if len(message.tool_call_id) > MAX_TOOL_CALL_ID_CHARACTERS:
            raise InvalidRequestError(
                f"longer than {MAX_TOOL_CALL_ID_CHARACTERS} characters",
                field=f"chat.messages[{index}].tool_call_id",
            )


def _check_room(num_tokens: int, facts: ModelFacts, field: str) -> None:
    most = facts.max_model_len - 1
    if num_tokens > most:
        raise InvalidRequestError(
            f"has {num_tokens} tokens; at most {most} leave room for an answer", field=field
        )


def _check_ids(token_ids: Sequence[int], vocab_size: int, field: str) -> None:
    """Their number was checked before: this looks at each."""
    if token_ids and max(token_ids) >= vocab_size:
        index = next(i for i, token_id in enumerate(token_ids) if token_id >= vocab_size)
        raise InvalidRequestError(
            f"{token_ids[index]} is not below the vocabulary's size, {vocab_size}",
            field=f"{field}[{index}]",
        )


def _check_request_id(request_id: str) -> None:
    is_short = len(request_id) <= MAX_REQUEST_ID_CHARACTERS
    if not (is_short and request_id.isprintable() and " " not in request_id):
        raise InvalidRequestError(
            f"must be 1 to {MAX_REQUEST_ID_CHARACTERS} printable characters without spaces",
            field="request_id",
        )

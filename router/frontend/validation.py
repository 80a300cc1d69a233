"""A client's request, checked and resolved: a bad one never reaches a worker. Pure.

Every refusal is an InvalidRequestError with the path of the field. ``check`` looks
at lengths before it looks at what they are the lengths of, so a request costs
next to nothing until it is known to fit; ``tokenize`` may take long and may run in
a thread; ``resolve`` needs the context length that the workers have.
"""

import hashlib
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from diptych.constraint import OutputGrammar
from diptych.errors import InvalidRequestError
from diptych.sampling_params import (
    OPTIONS,
    WORKER_NAMES,
    SamplingOptions,
    SamplingParams,
    check_options,
)
from diptych.text.chat_template import Message
from diptych.text.tokenizer import Tokenizer
from router.frontend.checked_form import CheckedForm
from router.frontend.told_logprobs import ToldLogprobs
from router.frontend.tools import check_tools
from router.generation.request import ChatPrompt, GenerationRequest, TextPrompt, TokenPrompt
from router.placement.claim import NO_CLAIM, Claim
from router.request.emitted_tokens import RequestShape
from router.request.prompt_told import WantedLogprobs
from router.request.resolved import ResolvedRequest

MAX_REQUEST_ID_CHARACTERS = 128
MAX_SALT_BYTES = 64
MAX_TOOL_CALL_ID_CHARACTERS = 256
MAX_ROLE_CHARACTERS = 64
MAX_NAME_CHARACTERS = 128
MAX_MESSAGES = 4096
MAX_PARTS = 16384  # content parts and tool calls of all messages
MAX_TEMPLATE_ARGUMENT_BYTES = 16384
MAX_UNIX_S = 253_402_214_400  # the last day, in any zone, with a year of four digits
MOST_IDS = 2**19
"""Of tokens, in all prompts of one request: reading so many takes the event loop some 60 ms."""
MAX_DIGEST_DIGITS = 32  # of weights, as workers tell it
_DIGITS = frozenset("0123456789abcdef")


CheckLength = Callable[[int, int, str], None]
"""Whether so many tokens may come, where the context has so many; in a field of that name."""


class ModelFacts(NamedTuple):
    """What requests are checked against."""

    vocab_size: int
    max_model_len: int  # the model's, or less where the workers have less
    eos_token_ids: frozenset[int]
    recommended: SamplingOptions  # by the model's makers


class EncodedPrompt(NamedTuple):
    """A prompt as the model reads it."""

    token_ids: list[int]
    own_end: str | None = None
    """Behind all in which clients' control tokens are plain text; None: there is no such part."""
    bad_words: frozenset[tuple[int, ...]] = frozenset()
    """Those of the request, in tokens."""


def check_room(num_tokens: int, max_model_len: int, field: str) -> None:
    """For front ends too, before they look at each token. Raises InvalidRequestError."""
    most = max_model_len - 1
    if num_tokens > most:
        raise InvalidRequestError(
            f"{_longest(max_model_len)}: this has {num_tokens}; at most {most} leave room for an "
            "answer",
            field=field,
        )


def _longest(max_model_len: int) -> str:
    """In OpenAI's and vLLM's words, by which clients know that a shorter prompt would do."""
    return f"This model's maximum context length is {max_model_len} tokens"


def check_num_ids(num_tokens: int, max_model_len: int, field: str) -> None:
    """As ``check_room``, of tokens that nobody answers."""
    most = max(MOST_IDS, max_model_len)
    if num_tokens > most:
        raise InvalidRequestError(f"has {num_tokens} tokens, more than {most}", field=field)


def check(
    request: GenerationRequest, facts: ModelFacts, check_length: CheckLength = check_room
) -> None:
    """Check all that needs no tokenising. Raises InvalidRequestError.

    ``check_length`` is for the prompt, where it is token ids.
    """
    check_options(request.sampling, "sampling")
    _check_choices(request)
    for index, stop in enumerate(request.sampling.stop):
        _check_text(stop, f"sampling.stop[{index}]")
    for index, word in enumerate(request.sampling.bad_words):
        _check_text(word, f"sampling.bad_words[{index}]")
    _check_constraint(request.sampling, facts)
    _check_ids(request.sampling.stop_token_ids, facts.vocab_size, "sampling.stop_token_ids")
    _check_keys(request.sampling.logit_bias, facts.vocab_size, "sampling.logit_bias")
    if request.request_id:
        check_request_id(request.request_id)
    _check_salt(request.cache_salt)
    request.level.check()
    match request.prompt:
        case TextPrompt(text):
            if not text:
                raise InvalidRequestError("is empty", field="text")
        case TokenPrompt(token_ids):
            _check_token_prompt(token_ids, facts, check_length)
        case ChatPrompt():
            _check_chat(request.prompt)
            check_tools(request, request.prompt)
    check_room(len(request.emitted_token_ids), facts.max_model_len, "emitted_token_ids")
    _check_ids(request.emitted_token_ids, facts.vocab_size, "emitted_token_ids")
    _check_digest(request)


def tokenize(request: GenerationRequest, tokenizer: Tokenizer, max_model_len: int) -> EncodedPrompt:
    """The prompt's token ids. Raises InvalidRequestError, for hopeless lengths at once."""
    own_end: str | None = None
    match request.prompt:
        case TokenPrompt(token_ids):
            return EncodedPrompt(list(token_ids))
        case TextPrompt(text, is_continuation, is_continued):
            encode = partial(
                tokenizer.encode,
                text,
                add_special=not is_continuation,
                is_continued=is_continued,
            )
        case ChatPrompt(messages, arguments):
            tools = request.prompt.offered_tools
            if tokenizer.has_inert_contents:  # to look through them takes long, too
                contents = "".join(message.content for message in messages)
                _check_hopeless(contents, request.prompt_field, tokenizer, max_model_len)
            rendered = tokenizer.render_chat(
                messages, arguments, tools, now_unix_s=request.prompt.now_unix_s
            )
            text, encode = rendered.text, partial(tokenizer.encode_chat, rendered)
            own_end = rendered.own_end
    _check_hopeless(text, request.prompt_field, tokenizer, max_model_len)
    token_ids = _encoded(encode, request.prompt_field)
    if not token_ids:
        raise InvalidRequestError("has no tokens", field=request.prompt_field)
    _check_known(token_ids, tokenizer, request.prompt_field)
    return EncodedPrompt(token_ids, own_end)


def tokenize_bad_words(words: Sequence[str], tokenizer: Tokenizer) -> frozenset[tuple[int, ...]]:
    """The tokens of each word, as it is alone and after a space. Raises InvalidRequestError."""
    found: set[tuple[int, ...]] = set()
    for index, word in enumerate(words):
        field = f"sampling.bad_words[{index}]"
        encode = partial(tokenizer.encode, add_special=False)
        alone = tuple(_encoded(partial(encode, word), field))
        if not alone:
            raise InvalidRequestError("has no tokens", field=field)
        spaced = tuple(_encoded(partial(encode, f" {word}"), field))
        _check_known(alone + spaced, tokenizer, field)
        found |= {alone, spaced}
    return frozenset(found)


def _encoded(encode: Callable[[], list[int]], field: str) -> list[int]:
    """What ``encode`` returns. Raises InvalidRequestError: the model has no tokens for it."""
    try:
        return encode()
    except Exception as error:
        if type(error) is not Exception:  # the library raises plain ones
            raise
        raise InvalidRequestError(f"the model's tokenizer: {error}", field=field) from None


def resolve(
    request: GenerationRequest,
    prompt: EncodedPrompt,
    facts: ModelFacts,
    *,
    drawn_seed: int,
    claim: Claim = NO_CLAIM,
    bad_words: frozenset[tuple[int, ...]] = frozenset(),
    form: CheckedForm | None = None,
) -> ResolvedRequest:
    """Fill in what the client left open, within the context length and the log probabilities' room.

    What the client did not say the model's makers do, then the defaults; ``drawn_seed`` is used
    if the client gave none; ``bad_words`` are the tokens of the client's, ``form`` what its
    output is held to. Raises InvalidRequestError.
    """
    prompt_ids, grammar = prompt.token_ids, "" if form is None else form.grammar
    check_room(len(prompt_ids), facts.max_model_len, request.prompt_field)
    told = ToldLogprobs.of(request, len(prompt_ids))
    max_tokens = _max_tokens(request, len(prompt_ids), facts.max_model_len, told)
    given = request.sampling
    chosen = {name: chosen_option(name, given, facts.recommended) for name in WORKER_NAMES}
    if request.emitted_token_ids and given.seed is None and chosen["temperature"] > 0:
        raise InvalidRequestError(
            "is needed to continue a sampled output: that of its Started", field="sampling.seed"
        )
    stop_token_ids = frozenset(given.stop_token_ids)
    if not given.ignore_eos:
        stop_token_ids |= facts.eos_token_ids
    # With a constraint a stop token that comes early came because nothing else fits.
    min_tokens = 0 if grammar else given.min_tokens
    _check_goes_on(request.emitted_token_ids, stop_token_ids, min_tokens)
    chosen["seed"] = drawn_seed if given.seed is None else given.seed
    chosen |= {
        "max_tokens": max_tokens,
        "stop_token_ids": stop_token_ids,
        "bad_words": bad_words,
        "constraint": OutputGrammar(grammar, facts.eos_token_ids) if grammar else None,
    }
    if given.num_drawn > given.num_choices and given.logprobs is None:
        chosen["logprobs"] = 0  # by which the best are known
    return ResolvedRequest(
        shape=RequestShape(
            prompt_ids=tuple(prompt_ids),
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=stop_token_ids,
            told=_wanted(request, len(prompt_ids)),
            has_logprobs=chosen["logprobs"] is not None,
        ),
        sampling=SamplingParams(**chosen),
        stop=given.stop,
        min_tokens_to_stop=given.min_tokens,
        includes_stop=given.include_stop_str_in_output,
        cache_salt=salt_of(request.cache_salt, request.tenant.name),
        claim=claim,
        num_choices=given.num_drawn,
        num_best=given.num_choices,
        tells_logprobs=given.logprobs is not None,
        num_logprobs=told.check(max_tokens),
        emitted_token_ids=tuple(request.emitted_token_ids),
        model_digest=request.model_digest,
        thoughts=None if form is None else form.thoughts,
        calls=() if form is None else form.calls,
        own_end=prompt.own_end,
    )


def _check_choices(request: GenerationRequest) -> None:
    wanted, drawn = request.sampling.num_choices, request.sampling.num_drawn
    if drawn < wanted:
        raise InvalidRequestError(f"{drawn} is less than n, {wanted}", field="sampling.best_of")
    if drawn > 1 and request.emitted_token_ids:
        raise InvalidRequestError("goes on with one choice only", field="emitted_token_ids")


def _wanted(request: GenerationRequest, num_prompt: int) -> WantedLogprobs | None:
    """They came before the first token: who resumes has them."""
    num_top = request.sampling.prompt_logprobs
    if num_top is None or request.emitted_token_ids:
        return None
    return WantedLogprobs(1, num_prompt, num_top)


def chosen_option(name: str, given: SamplingOptions, recommended: SamplingOptions) -> Any:
    """What the client says, else what the model's makers do, else the default."""
    for options in (given, recommended):
        value = getattr(options, name)
        if value is not None:
            return value
    return OPTIONS[name].default


def _max_tokens(
    request: GenerationRequest, num_prompt: int, max_model_len: int, told: ToldLogprobs
) -> int:
    given, room = request.sampling, max_model_len - num_prompt
    max_tokens = told.max_tokens(room) if given.max_tokens is None else given.max_tokens
    if max_tokens > room:
        raise InvalidRequestError(
            f"{_longest(max_model_len)}: {max_tokens} after a prompt of {num_prompt} exceed it",
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


def _check_constraint(given: SamplingOptions, facts: ModelFacts) -> None:
    """All but whether it can be compiled."""
    constraint = given.constraint
    if constraint is None:
        return
    path = f"sampling.constraint.{constraint.kind.value}"
    for text in constraint.texts:
        _check_text(text, path)
    if not facts.eos_token_ids:
        raise InvalidRequestError("this model has no token that ends an output", field=path)
    if given.ignore_eos:
        raise InvalidRequestError(
            "an output with a constraint ends where that does", field="sampling.ignore_eos"
        )


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


def _check_token_prompt(
    token_ids: Sequence[int], facts: ModelFacts, check_length: CheckLength
) -> None:
    if not token_ids:
        raise InvalidRequestError("is empty", field="tokens")
    check_length(len(token_ids), facts.max_model_len, "tokens")
    _check_ids(token_ids, facts.vocab_size, "tokens.ids")


def salt_of(cache_salt: str, tenant: str) -> bytes:
    """Tenants share no cached KV, whichever salts they give."""
    salt = cache_salt.encode()
    if not tenant:
        return salt
    return hashlib.sha256(tenant.encode() + b"\0" + salt).digest()


def _check_salt(cache_salt: str) -> None:
    if len(cache_salt) <= MAX_SALT_BYTES:
        _check_text(cache_salt, "cache_salt")
    if len(cache_salt) > MAX_SALT_BYTES or len(cache_salt.encode()) > MAX_SALT_BYTES:
        raise InvalidRequestError(f"longer than {MAX_SALT_BYTES} bytes", field="cache_salt")


def _check_digest(request: GenerationRequest) -> None:
    digest = request.model_digest
    if len(digest) > MAX_DIGEST_DIGITS or not _DIGITS.issuperset(digest):
        raise InvalidRequestError(
            f"should be that of a Started, of {MAX_DIGEST_DIGITS} hexadecimal digits",
            field="model_digest",
        )
    if digest and not request.emitted_token_ids:
        raise InvalidRequestError("goes with emitted_token_ids", field="model_digest")


def _check_text(text: str, field: str) -> None:
    """JSON may carry halves of characters, and a template may join what was text into one."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"has half of a character, U+{ord(text[error.start]):04X}", field=field
        ) from None


def _check_hopeless(text: str, field: str, tokenizer: Tokenizer, max_model_len: int) -> None:
    """Whether all that is said fits, without tokenising, as far as that can be known."""
    _check_text(text, field)
    at_least = tokenizer.min_tokens(text)
    if at_least >= max_model_len:
        raise InvalidRequestError(
            f"{_longest(max_model_len)}: this has {at_least} or more", field=field
        )


def _check_chat(chat: ChatPrompt) -> None:
    if not chat.messages:
        raise InvalidRequestError("is empty", field="chat.messages")
    check_num_messages(len(chat.messages))
    for index, message in enumerate(chat.messages):
        _check_message(message, f"chat.messages[{index}]")
    if not 0 <= chat.now_unix_s <= MAX_UNIX_S:
        raise InvalidRequestError(f"is not from 0 to {MAX_UNIX_S}", field="chat.now_unix_s")
    written = _json_text(chat.template_arguments, "chat.template_arguments")
    if len(written) > MAX_TEMPLATE_ARGUMENT_BYTES:
        raise InvalidRequestError(
            f"longer than {MAX_TEMPLATE_ARGUMENT_BYTES} bytes", field="chat.template_arguments"
        )


def check_num_messages(num_messages: int) -> None:
    """For front ends too, before they go through them. Raises InvalidRequestError."""
    if num_messages > MAX_MESSAGES:
        raise InvalidRequestError(
            f"has {num_messages} items, more than {MAX_MESSAGES}", field="chat.messages"
        )


def _check_message(message: Message, path: str) -> None:
    if not message.role:
        raise InvalidRequestError("is empty", field=f"{path}.role")
    for name, value, most in (
        ("role", message.role, MAX_ROLE_CHARACTERS),
        ("tool_call_id", message.tool_call_id, MAX_TOOL_CALL_ID_CHARACTERS),
        ("name", message.name, MAX_NAME_CHARACTERS),
    ):
        if len(value) > most:
            raise InvalidRequestError(f"longer than {most} characters", field=f"{path}.{name}")
    for index, call in enumerate(message.tool_calls):
        if not call.name:
            raise InvalidRequestError("is empty", field=f"{path}.tool_calls[{index}].name")


def _json_text(arguments: Mapping[str, object], field: str) -> bytes:
    """As a template writes it out; Python knows NaN, 1e999 and "\\ud800" too."""
    try:
        return json.dumps(dict(arguments), ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        raise InvalidRequestError(
            "has a number or a character that no JSON text can say", field=field
        ) from None


def _check_ids(token_ids: Sequence[int], vocab_size: int, field: str) -> None:
    """Their number was checked before: this looks at each."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        index = next(i for i, token_id in enumerate(token_ids) if not 0 <= token_id < vocab_size)
        raise InvalidRequestError(
            f"{token_ids[index]} is not from 0 to {vocab_size - 1}, the vocabulary",
            field=f"{field}[{index}]",
        )


def _check_known(token_ids: Sequence[int], tokenizer: Tokenizer, field: str) -> None:
    """Of a text: some tokenizers have more tokens than their model."""
    highest = max(token_ids)
    if highest >= tokenizer.vocab_size:
        text = tokenizer.text.spelling(highest).decode(errors="replace")
        raise InvalidRequestError(
            f"has {text!r}, token {highest}: the model's are from 0 to {tokenizer.vocab_size - 1}",
            field=field,
        )


def _check_keys(by_token_id: Mapping[int, float], vocab_size: int, field: str) -> None:
    for token_id in by_token_id:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"{token_id} is not from 0 to {vocab_size - 1}, the vocabulary",
                field=f"{field}[{token_id}]",
            )


def recorded_id(request_id: str) -> str:
    """What a request is called in its record, which begins before its id is checked."""
    if len(request_id) > MAX_REQUEST_ID_CHARACTERS:
        return "invalid"
    return request_id or uuid.uuid4().hex


def check_request_id(request_id: str) -> None:
    """Raise InvalidRequestError for an id that is empty, too long or not one printable word."""
    is_short = 1 <= len(request_id) <= MAX_REQUEST_ID_CHARACTERS
    if not (is_short and request_id.isprintable() and " " not in request_id):
        raise InvalidRequestError(
            f"must be 1 to {MAX_REQUEST_ID_CHARACTERS} printable characters without spaces",
            field="request_id",
        )

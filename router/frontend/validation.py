"""A client's request, checked and resolved: a bad one never reaches a worker. Pure.

Every refusal is an InvalidRequestError with the path of the field. ``check`` is
cheap; ``tokenize`` may take long and may run in a thread; ``resolve`` needs the
context length that the workers have.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from diptych.errors import InvalidRequestError
from diptych.text.chat_template import Message
from diptych.text.tokenizer import Tokenizer
from diptych.v1 import common_pb2, inference_pb2
from router.request.emitted_tokens import RequestShape

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_REQUEST_ID_CHARACTERS = 128
MAX_SALT_BYTES = 64
MAX_TEMPERATURE = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRequest:
    """What a worker and the answer need; nothing is unset."""

    shape: RequestShape
    sampling: common_pb2.SamplingParams  # as workers get it
    stop: tuple[str, ...]
    cache_salt: bytes
    return_margins: bool


def check(request: inference_pb2.GenerateRequest, vocab_size: int) -> None:
    """Check all that needs no tokenising. Raises InvalidRequestError."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequestError("give one of text, chat and tokens", field="prompt")
    if kind == "text" and not request.text:
        raise InvalidRequestError("is empty", field="text")
    if kind == "tokens":
        if not request.tokens.ids:
            raise InvalidRequestError("is empty", field="tokens")
        _check_ids(request.tokens.ids, vocab_size, "tokens.ids")
    if kind == "chat":
        _check_chat(request.chat)
    _check_sampling(request.sampling, vocab_size)
    if request.request_id:
        _check_request_id(request.request_id)
    if len(request.cache_salt.encode()) > MAX_SALT_BYTES:
        raise InvalidRequestError(f"longer than {MAX_SALT_BYTES} bytes", field="cache_salt")


def tokenize(
    request: inference_pb2.GenerateRequest, tokenizer: Tokenizer, max_model_len: int
) -> list[int]:
    """The prompt's token ids. Raises InvalidRequestError, for hopeless lengths at once."""
    kind = request.WhichOneof("prompt")
    if kind == "tokens":
        return list(request.tokens.ids)
    if kind == "text":
        text = request.text
    else:
        messages = [Message(turn.role, turn.content) for turn in request.chat.messages]
        text = tokenizer.render_chat(messages)
    field = "text" if kind == "text" else "chat.messages"
    at_least = tokenizer.min_tokens(text)
    if at_least >= max_model_len:
        raise InvalidRequestError(
            f"has {at_least} tokens or more; at most {max_model_len - 1} leave room for an answer",
            field=field,
        )
    token_ids = tokenizer.encode(text, add_special=kind == "text")
    if not token_ids:
        raise InvalidRequestError("has no tokens", field=field)
    return token_ids


def resolve(
    request: inference_pb2.GenerateRequest,
    prompt_ids: Sequence[int],
    *,
    eos_token_ids: frozenset[int],
    max_model_len: int,
    drawn_seed: int,
) -> ResolvedRequest:
    """Fill in what the client left open, within the context length.

    ``drawn_seed`` is used if the client gave none. Raises InvalidRequestError.
    """
    room = max_model_len - len(prompt_ids)
    if room < 1:
        kind = request.WhichOneof("prompt")
        raise InvalidRequestError(
            f"has {len(prompt_ids)} tokens; at most {max_model_len - 1} leave room for an answer",
            field="chat.messages" if kind == "chat" else str(kind),
        )
    given = request.sampling
    if given.HasField("max_tokens") and given.max_tokens > room:
        raise InvalidRequestError(
            f"{given.max_tokens} tokens after a prompt of {len(prompt_ids)} exceed the context "
            f"of {max_model_len}",
            field="sampling.max_tokens",
        )
    max_tokens = given.max_tokens if given.HasField("max_tokens") else room
    if given.min_tokens > max_tokens:
        raise InvalidRequestError(
            f"{given.min_tokens} is more than max_tokens, {max_tokens}",
            field="sampling.min_tokens",
        )
    stop_token_ids = frozenset(given.stop_token_ids)
    if not given.ignore_eos:
        stop_token_ids |= eos_token_ids
    sampling = common_pb2.SamplingParams(
        temperature=given.temperature if given.HasField("temperature") else 1.0,
        top_k=given.top_k,
        top_p=given.top_p if given.HasField("top_p") else 1.0,
        seed=given.seed if given.HasField("seed") else drawn_seed,
        max_tokens=max_tokens,
        min_tokens=given.min_tokens,
        stop_token_ids=sorted(stop_token_ids),
        ignore_eos=given.ignore_eos,
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
        stop=tuple(given.stop),
        cache_salt=request.cache_salt.encode(),
        return_margins=given.return_margins,
    )


def _check_chat(chat: inference_pb2.ChatPrompt) -> None:
    if not chat.messages:
        raise InvalidRequestError("is empty", field="chat.messages")
    for index, message in enumerate(chat.messages):
        if not message.role:
            raise InvalidRequestError("is empty", field=f"chat.messages[{index}].role")


def _check_sampling(given: common_pb2.SamplingParams, vocab_size: int) -> None:
    temperature = given.temperature
    if not (math.isfinite(temperature) and 0 <= temperature <= MAX_TEMPERATURE):
        raise InvalidRequestError(
            f"{temperature} is not within 0 and {MAX_TEMPERATURE:g}", field="sampling.temperature"
        )
    if given.HasField("top_p") and not 0 < given.top_p <= 1:
        raise InvalidRequestError(f"{given.top_p} is not within (0, 1]", field="sampling.top_p")
    if given.HasField("max_tokens") and given.max_tokens == 0:
        raise InvalidRequestError("must be at least 1", field="sampling.max_tokens")
    if len(given.stop) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"more than {MAX_STOP_STRINGS} strings", field="sampling.stop")
    for index, stop in enumerate(given.stop):
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise InvalidRequestError(
                f"must have 1 to {MAX_STOP_CHARACTERS} characters, has {len(stop)}",
                field=f"sampling.stop[{index}]",
            )
    if len(given.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError(
            f"more than {MAX_STOP_TOKEN_IDS} ids", field="sampling.stop_token_ids"
        )
    _check_ids(given.stop_token_ids, vocab_size, "sampling.stop_token_ids")


def _check_ids(token_ids: Sequence[int], vocab_size: int, field: str) -> None:
    if token_ids and max(token_ids) >= vocab_size:
        index = next(i for i, token_id in enumerate(token_ids) if token_id >= vocab_size)
        raise InvalidRequestError(
            f"{token_ids[index]} is not below the vocabulary's size, {vocab_size}",
            field=f"{field}[{index}]",
        )


def _check_request_id(request_id: str) -> None:
    printable = request_id.isprintable() and " " not in request_id
    if len(request_id) > MAX_REQUEST_ID_CHARACTERS or not printable:
        raise InvalidRequestError(
            f"must be 1 to {MAX_REQUEST_ID_CHARACTERS} printable characters without spaces",
            field="request_id",
        )

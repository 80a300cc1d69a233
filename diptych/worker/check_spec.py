"""A worker's own check of what a router sends. Pure."""

from collections.abc import Iterable

from diptych.constraint import MAX_GRAMMAR_BYTES
from diptych.errors import InvalidRequestError
from diptych.sampling_params import MAX_BAD_WORDS, SamplingParams, check_options
from diptych.v1 import common_pb2

MAX_SALT_BYTES = 64  # as inference.proto says
MAX_PAYER_BYTES, MAX_TIER = 64, 15  # as common.proto says
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000  # likewise; 0: none was said
MAX_OBJECTIVE_S = 86_400.0  # likewise


def check_spec(spec: common_pb2.SequenceSpec, *, vocab_size: int, max_model_len: int) -> None:
    """Raise InvalidRequestError unless ``spec`` is complete and can run here.

    The router validated the client's request; this guards the engine against a
    router of another version or with another model in mind.
    """
    num_tokens, num_prompt = len(spec.token_ids), spec.num_prompt_tokens
    if num_tokens == 0:
        raise InvalidRequestError("is empty", field="spec.token_ids")
    if num_tokens >= max_model_len:
        raise InvalidRequestError(
            f"{num_tokens} tokens leave no room for output in {max_model_len}",
            field="spec.token_ids",
        )
    check_token_ids(spec.token_ids, vocab_size=vocab_size, field="spec.token_ids")
    if not 1 <= num_prompt <= num_tokens:
        raise InvalidRequestError(
            f"{num_prompt} is not within 1 and {num_tokens}", field="spec.num_prompt_tokens"
        )
    if len(spec.cache_salt) > MAX_SALT_BYTES:
        raise InvalidRequestError(f"longer than {MAX_SALT_BYTES} bytes", field="spec.cache_salt")
    if len(spec.payer) > MAX_PAYER_BYTES:
        raise InvalidRequestError(f"longer than {MAX_PAYER_BYTES} bytes", field="spec.payer")
    if spec.tier > MAX_TIER:
        raise InvalidRequestError(f"{spec.tier} is above {MAX_TIER}", field="spec.tier")
    if spec.tier_weight and not MIN_WEIGHT <= spec.tier_weight <= MAX_WEIGHT:
        raise InvalidRequestError(
            f"{spec.tier_weight} is not from {MIN_WEIGHT} to {MAX_WEIGHT}",
            field="spec.tier_weight",
        )
    if not 0.0 <= spec.tpot_s <= MAX_OBJECTIVE_S:
        raise InvalidRequestError(f"{spec.tpot_s} is not from 0 to a day", field="spec.tpot_s")
    if not -MAX_OBJECTIVE_S <= spec.due_in_s <= MAX_OBJECTIVE_S:
        raise InvalidRequestError(f"{spec.due_in_s} is more than a day", field="spec.due_in_s")
    _check_sampling(spec.sampling, num_output=num_tokens - num_prompt, vocab_size=vocab_size)


def check_token_ids(token_ids: Iterable[int], *, vocab_size: int, field: str) -> None:
    """Raise InvalidRequestError naming the first id that the model lacks."""
    ids = list(token_ids)
    if ids and max(ids) >= vocab_size:
        index, bad = next((i, t) for i, t in enumerate(ids) if t >= vocab_size)
        raise InvalidRequestError(f"{bad} is not below {vocab_size}", field=f"{field}[{index}]")


def _check_constraint(sampling: common_pb2.SamplingParams, *, vocab_size: int) -> None:
    if not sampling.HasField("constraint"):
        return
    field = "spec.sampling.constraint.end_token_ids"
    ends = sampling.constraint.end_token_ids
    if not ends or not set(ends) <= set(sampling.stop_token_ids):
        raise InvalidRequestError("must be some of stop_token_ids", field=field)
    check_token_ids(ends, vocab_size=vocab_size, field=field)


def _check_sampling(
    sampling: common_pb2.SamplingParams, *, num_output: int, vocab_size: int
) -> None:
    # Counted before it is copied. It is a set, and the model's own are in it beside the
    # client's, so that the declared bound of the client's list is not its bound.
    num_stops = len(sampling.stop_token_ids)
    if num_stops > vocab_size:
        raise InvalidRequestError(
            f"has {num_stops} items, more than there are tokens, {vocab_size}",
            field="spec.sampling.stop_token_ids",
        )
    if len(sampling.constraint.text.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidRequestError(
            f"longer than {MAX_GRAMMAR_BYTES} bytes", field="spec.sampling.constraint.text"
        )
    num_words = len(sampling.bad_words)
    if num_words > 2 * MAX_BAD_WORDS:  # each as it is alone and after a space
        raise InvalidRequestError(
            f"has {num_words} items, more than {2 * MAX_BAD_WORDS}",
            field="spec.sampling.bad_words",
        )
    params = SamplingParams.from_proto(sampling)
    check_options(params, "spec.sampling")
    if not sampling.HasField("max_tokens"):
        raise InvalidRequestError("is not resolved", field="spec.sampling.max_tokens")
    if sampling.max_tokens <= num_output:
        raise InvalidRequestError(
            f"{sampling.max_tokens} leaves nothing after {num_output} output tokens",
            field="spec.sampling.max_tokens",
        )
    if not sampling.HasField("seed") and params.temperature > 0:
        raise InvalidRequestError("is not resolved", field="spec.sampling.seed")
    check_token_ids(
        sampling.stop_token_ids, vocab_size=vocab_size, field="spec.sampling.stop_token_ids"
    )
    _check_constraint(sampling, vocab_size=vocab_size)
    for index, word in enumerate(sampling.bad_words):
        field = f"spec.sampling.bad_words[{index}]"
        if not word.token_ids:
            raise InvalidRequestError("is empty", field=field)
        check_token_ids(word.token_ids, vocab_size=vocab_size, field=f"{field}.token_ids")
    for token_id in params.logit_bias:
        if token_id >= vocab_size:
            raise InvalidRequestError(
                f"is not below {vocab_size}", field=f"spec.sampling.logit_bias[{token_id}]"
            )

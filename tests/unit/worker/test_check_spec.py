"""What a worker refuses of what a router sends, by field."""

import math

import pytest

from diptych.errors import InvalidRequestError
from diptych.sampling_params import SamplingParams
from diptych.v1 import common_pb2
from diptych.worker.check_spec import check_spec


def spec(**sampling: object) -> common_pb2.SequenceSpec:
    values: dict[str, object] = {"temperature": 0.8, "seed": 1, "max_tokens": 4, **sampling}
    given = {name: value for name, value in values.items() if value is not None}
    return common_pb2.SequenceSpec(
        token_ids=[1, 2, 3],
        num_prompt_tokens=2,
        sampling=common_pb2.SamplingParams(**given),  # type: ignore[arg-type]
    )


def check(candidate: common_pb2.SequenceSpec) -> None:
    check_spec(candidate, vocab_size=10, max_model_len=8)


def test_a_resolved_spec_passes() -> None:
    check(spec())
    check(spec(temperature=0, seed=None))


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"temperature": -1}, "temperature"),
        ({"min_p": 2}, "min_p"),
        ({"bad_words": [{"token_ids": [1, 10]}]}, "bad_words[0].token_ids[1]"),
        ({"bad_words": [{"token_ids": [1]}, {}]}, "bad_words[1]"),
        ({"bad_words": [{"token_ids": [1]}] * 129}, "bad_words"),
        ({"logprobs": 21}, "logprobs"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": math.nan}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {3: 101}}, "logit_bias[3]"),
        ({"logit_bias": {3: 1, 10: 1}}, "logit_bias[10]"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": 101}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 1}, "max_tokens"),
        ({"seed": None}, "seed"),
        ({"temperature": None, "seed": None}, "seed"),
        ({"stop_token_ids": [3, 10]}, "stop_token_ids[1]"),
    ],
)
def test_sampling(sampling: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check(spec(**sampling))
    assert caught.value.field == f"spec.sampling.{field}"


@pytest.mark.parametrize(
    ("token_ids", "num_prompt_tokens", "field"),
    [
        ([], 0, "token_ids"),
        ([1] * 8, 1, "token_ids"),
        ([1, 10], 1, "token_ids[1]"),
        ([1, 2], 0, "num_prompt_tokens"),
        ([1, 2], 3, "num_prompt_tokens"),
    ],
)
def test_tokens(token_ids: list[int], num_prompt_tokens: int, field: str) -> None:
    candidate = spec()
    candidate.token_ids[:] = token_ids
    candidate.num_prompt_tokens = num_prompt_tokens
    with pytest.raises(InvalidRequestError) as caught:
        check(candidate)
    assert caught.value.field == f"spec.{field}"


def test_a_long_salt() -> None:
    candidate = spec()
    candidate.cache_salt = b"s" * 257
    with pytest.raises(InvalidRequestError, match="cache_salt"):
        check(candidate)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("payer", b"p" * 65),
        ("tier", 16),
        *(("tier_weight", each) for each in (-1.0, 5e-324, 0.00099, 1000.1, 1e308)),
        *(("tier_weight", each) for each in (math.inf, math.nan)),
        *(("tpot_s", each) for each in (-0.001, 86_400.1, math.inf, math.nan)),
        *(("due_in_s", each) for each in (-86_400.1, 86_400.1, math.inf, math.nan)),
    ],
)
def test_whose_turn_it_is(field: str, value: object) -> None:
    candidate = spec()
    check(candidate)
    setattr(candidate, field, value)
    with pytest.raises(InvalidRequestError) as caught:
        check(candidate)
    assert caught.value.field == f"spec.{field}"


@pytest.mark.parametrize("weight", [0.0, 0.001, 1.0, 1000.0])
def test_tiers_may_have_weights_or_none(weight: float) -> None:
    candidate = spec()
    candidate.tier_weight = weight
    check(candidate)


def test_too_many_stop_tokens_are_counted_before_they_are_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check(spec(stop_token_ids=range(10)))
    monkeypatch.setattr(SamplingParams, "from_proto", lambda message: pytest.fail("copied"))
    with pytest.raises(InvalidRequestError, match="11 items") as caught:
        check(spec(stop_token_ids=[1] * 11))
    assert caught.value.field == "spec.sampling.stop_token_ids"

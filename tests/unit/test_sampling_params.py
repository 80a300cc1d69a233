"""Every sampling parameter is declared once; the wire, the client and the flags follow."""

import math
from dataclasses import fields, replace
from typing import Any

import pytest

from diptych.cli.generate import GenerateConfig
from diptych.constraint import Constraint, OutputGrammar
from diptych.errors import InvalidRequestError
from diptych.sampling_params import (
    NOTHING_SAID,
    OPTIONS,
    WORKER_NAMES,
    SamplingOptions,
    SamplingParams,
    check_options,
    options_from_proto,
    options_to_proto,
)
from diptych.v1 import common_pb2, inference_pb2
from tests.work_count import num_calls

EVERYTHING = SamplingOptions(
    temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, logit_bias={7: -0.5, 8: 100.0},
    presence_penalty=0.5, frequency_penalty=-2.0, repetition_penalty=1.25, logprobs=3,
    prompt_logprobs=4, n=2, best_of=3, seed=2**64 - 1, max_tokens=9, min_tokens=2,
    stop=("a", "b"), stop_token_ids=(4, 5),
    include_stop_str_in_output=True, bad_words=("b", "c d"), ignore_eos=True,
    return_margins=True, constraint=Constraint.choice("a", "é"),
)  # fmt: skip


def test_the_public_message_has_each_option_and_no_other() -> None:
    wire = set(inference_pb2.SamplingOptions.DESCRIPTOR.fields_by_name)
    assert wire == set(OPTIONS)


def test_the_workers_message_has_each_parameter_of_theirs_and_no_other() -> None:
    assert set(common_pb2.SamplingParams.DESCRIPTOR.fields_by_name) == set(WORKER_NAMES)
    assert set(WORKER_NAMES) < set(OPTIONS)


def test_the_command_line_has_a_flag_for_each_option() -> None:
    flags = {name for name, option in OPTIONS.items() if option.is_flag}
    assert flags <= set(GenerateConfig.model_fields)
    for name in flags:
        assert OPTIONS[name].help in (GenerateConfig.model_fields[name].description or "")


def test_what_is_unset_is_absent_on_the_wire_exactly_where_it_can_be_asked_for() -> None:
    assert options_to_proto(NOTHING_SAID).ListFields() == []
    for item in fields(SamplingOptions):
        described = inference_pb2.SamplingOptions.DESCRIPTOR.fields_by_name[item.name]
        assert described.has_presence == (item.default is None), item.name


def test_defaults_are_told_once() -> None:
    resolved = SamplingParams()
    for name in WORKER_NAMES:
        default = OPTIONS[name].default
        assert default is None or getattr(resolved, name) == default, name


def test_everything_crosses_the_wire_and_comes_back() -> None:
    for item in fields(SamplingOptions):
        assert getattr(EVERYTHING, item.name) != getattr(NOTHING_SAID, item.name), item.name
    assert options_from_proto(options_to_proto(EVERYTHING), "sampling") == EVERYTHING
    resolved = SamplingParams(
        temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, logit_bias={7: -0.5},
        presence_penalty=0.5, frequency_penalty=-2.0, repetition_penalty=1.25, logprobs=0,
        bad_words=frozenset({(7,), (8, 9)}), seed=2**64 - 1, max_tokens=9, min_tokens=2,
        stop_token_ids=frozenset({4, 5}), return_margins=True,
        constraint=OutputGrammar("start: \"a\"", frozenset({4})),
    )  # fmt: skip
    assert SamplingParams.from_proto(resolved.to_proto()) == resolved
    greedy = SamplingParams(temperature=0.0).to_proto()
    assert greedy.HasField("temperature")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (SamplingOptions(max_tokens=0), "must be at least 1 and at most 4294967295, is 0"),
        (SamplingOptions(top_p=0.0), "must be above 0 and at most 1, is 0.0"),
    ],
)
def test_a_value_out_of_range_is_told_its_range_in_full(
    options: SamplingOptions, message: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_options(options, "sampling")
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (SamplingOptions(temperature=-0.1), "temperature"),
        (SamplingOptions(temperature=math.inf), "temperature"),
        (SamplingOptions(top_p=0.0), "top_p"),
        (SamplingOptions(top_p=math.nan), "top_p"),
        (SamplingOptions(seed=2**64), "seed"),
        (SamplingOptions(seed=-1), "seed"),
        (SamplingOptions(top_k=2**32), "top_k"),
        (SamplingOptions(max_tokens=0), "max_tokens"),
        (SamplingOptions(stop=("a", "")), "stop[1]"),
        (SamplingOptions(min_p=-0.01), "min_p"),
        (SamplingOptions(min_p=1.01), "min_p"),
        (SamplingOptions(bad_words=("a", "b" * 129)), "bad_words[1]"),
        (SamplingOptions(bad_words=("a",) * 65), "bad_words"),
        (SamplingOptions(logprobs=21), "logprobs"),
        (SamplingOptions(prompt_logprobs=21), "prompt_logprobs"),
        (SamplingOptions(presence_penalty=2.5), "presence_penalty"),
        (SamplingOptions(frequency_penalty=-2.5), "frequency_penalty"),
        (SamplingOptions(repetition_penalty=0.0), "repetition_penalty"),
        (SamplingOptions(repetition_penalty=math.inf), "repetition_penalty"),
        (SamplingOptions(logit_bias={3: 0.0, 4: 100.5}), "logit_bias[4]"),
        (SamplingOptions(logit_bias={3: math.nan}), "logit_bias[3]"),
        (SamplingOptions(constraint=Constraint.regex("")), "constraint.regex"),
        (SamplingOptions(constraint=Constraint.regex("a" * 65_537)), "constraint.regex"),
        (SamplingOptions(constraint=Constraint.choice("a", "")), "constraint.choice.texts[1]"),
        (SamplingOptions(constraint=Constraint.choice(*"a" * 1025)), "constraint.choice.texts"),
        (SamplingOptions(logit_bias=dict.fromkeys(range(1025), 1.0)), "logit_bias"),
    ],
)
def test_ranges_are_those_declared(options: SamplingOptions, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_options(options, "x")
    assert caught.value.field == f"x.{field}"


def test_what_is_left_as_it_is_is_within_its_range_and_is_not_looked_at() -> None:
    """Of each request that is most of them."""
    for options in (NOTHING_SAID, SamplingParams()):
        for name in (item.name for item in fields(options)):
            value, option = getattr(options, name), OPTIONS[name]
            if isinstance(value, int | float):
                assert option.low < value or (option.low == value and not option.is_low_excluded)
                assert value <= option.high
    num_beside = num_calls(lambda: fields(NOTHING_SAID)) + 1
    assert num_calls(lambda: check_options(NOTHING_SAID, "")) - num_beside <= 3


def test_bounds_themselves_are_allowed() -> None:
    check_options(SamplingOptions(temperature=100.0, top_p=1.0, seed=2**64 - 1), "x")
    check_options(SamplingOptions(temperature=0.0, top_k=0, max_tokens=1), "x")


@pytest.mark.parametrize("kind", ["json_schema", "regex", "grammar"])
def test_each_kind_of_constraint_crosses_the_wire(kind: str) -> None:
    options = SamplingOptions(constraint=getattr(Constraint, kind)('{"a": 1}'))
    assert options_from_proto(options_to_proto(options), "sampling") == options
    assert options_to_proto(options).constraint.WhichOneof("kind") == kind


def test_a_constraint_of_no_kind_is_refused() -> None:
    message = inference_pb2.SamplingOptions(constraint=inference_pb2.Constraint())
    with pytest.raises(InvalidRequestError) as caught:
        options_from_proto(message, "sampling")
    assert caught.value.field == "sampling.constraint"


def test_a_list_that_is_too_long_is_not_copied() -> None:
    message = inference_pb2.SamplingOptions(stop_token_ids=[1] * 1025)
    with pytest.raises(InvalidRequestError) as caught:
        options_from_proto(message, "sampling")
    assert caught.value.field == "sampling.stop_token_ids"
    message = inference_pb2.SamplingOptions(logit_bias=dict.fromkeys(range(1025), 1.0))
    with pytest.raises(InvalidRequestError) as caught:
        options_from_proto(message, "sampling")
    assert caught.value.field == "sampling.logit_bias"


FLOATS = [name for name in WORKER_NAMES if isinstance(getattr(SamplingParams(), name), float)]


@pytest.mark.parametrize("name", FLOATS)
def test_what_a_router_accepts_a_worker_does_too(name: str) -> None:
    """They are sent in 32 bits, in which a bound is another number."""
    low, high = OPTIONS[name].low, OPTIONS[name].high
    tried = [low, math.nextafter(low, high), low + 1e-46, math.nextafter(high, low), high]
    num_accepted = 0
    for value in tried:
        named: dict[str, Any] = {name: value}
        params = replace(SamplingParams(), **named)
        try:
            check_options(params, "x")
        except InvalidRequestError:
            continue
        check_options(SamplingParams.from_proto(params.to_proto()), "x")
        num_accepted += 1
    assert num_accepted >= 2

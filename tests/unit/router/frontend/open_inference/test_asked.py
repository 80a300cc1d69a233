"""What an inference request asks for, and what of it is refused under its own name."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from diptych.constraint import Constraint
from diptych.errors import InvalidRequestError, ModelNotFoundError
from diptych.open_inference import service_pb2
from diptych.request_class import RequestClass
from diptych.service_level import NO_LEVEL, ServiceLevel
from diptych.tenant import Tenant
from router.frontend.field_names import renamed
from router.frontend.open_inference.answers import check_size
from router.frontend.open_inference.asked import Asked, read_request
from router.generation.request import TextPrompt
from tests.unit.router.frontend.open_inference.infer_requests import (
    flag,
    raw_text,
    request,
    tensor,
)

Infer = service_pb2.ModelInferRequest
MINE = Tenant("mine")


def read(message: Infer) -> Asked:
    return read_request(message, num_bytes=9, max_model_len=100, tenant=MINE)


def parameters(**given: str | float | bool) -> Infer:
    return with_parameters(request(), given)


def with_parameters(made: Infer, given: Mapping[str, str | float | bool]) -> Infer:
    kinds: dict[type, str] = {bool: "bool", int: "int64", str: "string", float: "double"}
    for name, value in given.items():
        setattr(made.parameters[name], f"{kinds[type(value)]}_param", value)
    return made


def test_the_plain_request() -> None:
    message = request()
    message.id = "id"
    asked = read(message)
    assert asked.request.prompt == TextPrompt("Once")
    assert (asked.request.model, asked.request.request_id, asked.given_id) == ("m", "id", "id")
    assert (asked.request.tenant, asked.request.num_bytes) == (MINE, 9)
    assert asked.request.sampling.max_tokens == 16
    assert asked.outputs == {"text_output"}
    assert (asked.is_stream, asked.echoes, asked.timeout_s) == (False, True, None)
    assert not asked.request.return_prompt_token_ids


def test_sampling_comes_as_a_tensor_with_numbers_or_their_texts() -> None:
    numbers: dict[str, Any] = {"temperature": 0.5, "top_k": 3, "ignore_eos": True, "seed": 2**63}
    plain = read(request(**numbers, stop="x", logit_bias={"1": 2}, unknown={})).request.sampling
    texts = {name: str(value) for name, value in numbers.items()}
    said = read(request(**texts, stop=["x"], logit_bias={"1": 2})).request.sampling
    assert plain == said
    assert (said.temperature, said.top_k, said.ignore_eos) == (0.5, 3, True)
    assert (said.seed, said.stop, said.logit_bias) == (2**63, ("x",), {1: 2})


def test_or_as_parameters_of_the_request() -> None:
    message = parameters(temperature=0.5, max_tokens=7, ignore_eos="False", top_p="0.25", stop="x")
    sampling = read(message).request.sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.top_p) == (0.5, 7, 0.25)
    assert (sampling.ignore_eos, sampling.stop) == (False, ("x",))
    both = read(with_parameters(request(max_tokens=3), {"max_tokens": "nonsense"})).request.sampling
    assert both.max_tokens == 3


@pytest.mark.parametrize("make", [request, parameters])
def test_a_salt_and_what_the_service_is_to_be_go_along(make: Callable[..., Infer]) -> None:
    message = make(cache_salt="mine", priority="batch", ttft_ms="500", tpot_ms=40)
    asked = read(message)
    assert asked.request.cache_salt == "mine"
    assert asked.request.level == ServiceLevel(RequestClass.BATCH, 500.0, 40.0)
    plain = read(make(priority=0)).request
    assert (plain.cache_salt, plain.level) == ("", NO_LEVEL)


@pytest.mark.parametrize("name", ["cache_salt", "ttft_ms", "tpot_ms"])
def test_what_goes_along_is_checked_under_its_name(name: str) -> None:
    refused = InvalidRequestError("no", field=name)
    assert renamed(refused, read(request(n=1)).names).field == f"sampling_parameters.{name}"
    assert renamed(refused, read(parameters(n=1)).names).field == f"parameters.{name}"


def test_a_constraint_has_the_names_of_http() -> None:
    asked = read(request(guided_choice=["a", "b"]))
    assert asked.request.sampling.constraint is not None
    refused = InvalidRequestError("no", field="sampling.constraint.choice")
    assert renamed(refused, asked.names).field == "sampling_parameters.guided_choice"


@pytest.mark.parametrize("name", ["guided_decoding", "structured_outputs"])
@pytest.mark.parametrize("write", [json.dumps, dict])
def test_a_constraint_may_be_a_text_as_for_tritons_backend(
    name: str, write: Callable[[dict[str, Any]], Any]
) -> None:
    asked = read(request(**{name: write({"choice": ["a", "b"]})}))
    assert asked.request.sampling.constraint == Constraint.choice("a", "b")
    refused = InvalidRequestError("no", field="sampling.constraint.choice")
    assert renamed(refused, asked.names).field == f"sampling_parameters.{name}.choice"
    with pytest.raises(InvalidRequestError, match=rf"sampling_parameters\.{name}"):
        read(request(**{name: "{"}))


def test_more_log_probabilities_than_a_number_may_have_digits_are_refused() -> None:
    asked = read(request(max_tokens="9" * 4300, logprobs=20))
    with pytest.raises(InvalidRequestError, match="return_logprobs"):
        check_size(dataclasses.replace(asked, outputs=frozenset({"text_output", "logprobs"})))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("sampling.stop[0]", "parameters.stop[0]"),
        ("text", "text_input"),
        ("request_id", "id"),
    ],
)
def test_fields_are_called_what_they_are_here(ours: str, theirs: str) -> None:
    asked = read(parameters(max_tokens=7))
    assert renamed(InvalidRequestError("no", field=ours), asked.names).field == theirs


def test_outputs_are_those_named_or_those_that_flags_want() -> None:
    flags = [flag("return_finish_reason"), flag("return_num_input_tokens", False)]
    assert read(request(*flags)).outputs == {"text_output", "finish_reason"}
    named = request(*flags, flag("stream"))
    named.outputs.add(name="num_input_tokens")
    asked = read(named)
    assert asked.outputs == {"num_input_tokens"}
    assert asked.request.return_prompt_token_ids


@pytest.mark.parametrize("name", ["return_logprobs", "return_cumulative_logprob"])
def test_who_wants_log_probabilities_need_not_say_of_how_many(name: str) -> None:
    assert read(request(flag(name))).request.sampling.logprobs == 0
    assert read(request(flag(name), logprobs=2)).request.sampling.logprobs == 2
    assert read(request(flag(name, False))).request.sampling.logprobs is None


def test_a_stream_tells_the_prompt_only_on_request_and_never_again() -> None:
    for excluded in ([], [flag("exclude_input_in_output")]):
        assert not read(request(flag("stream"), *excluded)).echoes
    assert not read(request(flag("exclude_input_in_output"))).echoes


def test_a_timeout_is_in_microseconds() -> None:
    assert read(parameters(timeout=1_500_000)).timeout_s == 1.5
    assert read(parameters(timeout=0)).timeout_s is None


def output(name: str, **parameter: str) -> Infer:
    made = request()
    made.outputs.add(name=name)
    for key, value in parameter.items():
        made.outputs[0].parameters[key].string_param = value
    return made


def many_parameters() -> Infer:
    return with_parameters(request(), {f"p{index}": 1 for index in range(300)})


def many_outputs() -> Infer:
    return Infer(
        inputs=request().inputs,
        raw_input_contents=[raw_text("a")],
        outputs=[Infer.InferRequestedOutputTensor(name="text_output")] * 50_000,
    )


REFUSED: dict[str, tuple[Callable[[], Infer], str]] = {
    "no JSON": (
        lambda: request((tensor("sampling_parameters"), raw_text("{"))),
        "sampling_parameters",
    ),
    "no object": (
        lambda: request((tensor("sampling_parameters"), raw_text("[]"))),
        "sampling_parameters",
    ),
    "no number": (lambda: request(top_k="many"), "sampling_parameters.top_k"),
    "no flag": (lambda: request(ignore_eos="perhaps"), "sampling_parameters.ignore_eos"),
    "part of a token": (lambda: parameters(max_tokens=1.5), "parameters.max_tokens"),
    "endless": (lambda: request(temperature="nan"), "sampling_parameters.temperature"),
    "beams": (lambda: request(use_beam_search=True), "sampling_parameters.use_beam_search"),
    "an adapter": (lambda: parameters(lora_name="mine"), "parameters.lora_name"),
    "logprobs": (lambda: request(logprobs="many"), "sampling_parameters.logprobs"),
    "two constraints": (lambda: request(guided_regex="a", regex="b"), "sampling_parameters.regex"),
    "choices without end": (lambda: parameters(n=2**32), "parameters.n"),
    "choices in pieces": (lambda: request(flag("stream"), n=2), "sampling_parameters.n"),
    "the best in pieces": (
        lambda: request(flag("stream"), best_of=2),
        "sampling_parameters.best_of",
    ),
    "the prompt in pieces": (
        lambda: request(flag("stream"), flag("exclude_input_in_output", False)),
        "exclude_input_in_output",
    ),
    "a sequence": (lambda: parameters(sequence_id="a"), "parameters.sequence_id"),
    "a priority": (lambda: parameters(priority=1), "parameters.priority"),
    "a priority beside others": (
        lambda: with_parameters(request(priority="batch"), {"priority": 1}),
        "parameters.priority",
    ),
    "no class": (lambda: request(priority="first"), "sampling_parameters.priority"),
    "no salt": (lambda: request(cache_salt=1), "sampling_parameters.cache_salt"),
    "an endless objective": (lambda: request(tpot_ms="nan"), "sampling_parameters.tpot_ms"),
    "a timeout": (lambda: parameters(timeout=-1), "parameters.timeout"),
    "a text of time": (lambda: parameters(timeout="1"), "parameters.timeout"),
    "many parameters": (many_parameters, "parameters"),
    "many outputs": (many_outputs, "outputs"),
    "another output": (lambda: output("logits"), "outputs[0].name"),
    "classes": (
        lambda: output("text_output", classification="3"),
        "outputs[0].parameters.classification",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_served_is_refused_by_its_name(case: str) -> None:
    make, field = REFUSED[case]
    with pytest.raises(InvalidRequestError) as caught:
        read(make())
    assert caught.value.field == field
    assert caught.value.message.startswith(f"{field}: ")


def test_a_model_has_one_version() -> None:
    message = request()
    message.model_version = "1"
    read(message)
    message.model_version = "2"
    with pytest.raises(ModelNotFoundError):
        read(message)

"""What an inference request asks for: the request that the generator gets, and its answer's form.

Pure. Sampling parameters have the names that they have over HTTP. As in Triton's vLLM backend
they come as one tensor of JSON or else as the request's parameters, and any of them may be a text.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, get_args, get_type_hints

from diptych.errors import InvalidRequestError, ModelNotFoundError
from diptych.open_inference import service_pb2
from diptych.request_class import RequestClass
from diptych.sampling_params import MAX_CHOICES, SamplingOptions
from diptych.service_level import ServiceLevel
from diptych.tenant import Tenant
from router.frontend.http import unserved
from router.frontend.http.asked import LevelFields
from router.frontend.http.body import FIELD, parse, validated
from router.frontend.http.completion_request import DEFAULT_MAX_TOKENS
from router.frontend.http.constraint_fields import OBJECTS, read_constraint
from router.frontend.http.sampling_fields import SERVED, read_sampling
from router.frontend.open_inference import tensors
from router.frontend.open_inference.tensors import Inputs
from router.generation.request import GenerationRequest, TextPrompt

VERSION: Final = "1"
"""The one that a model has."""

FINAL_RESPONSE: Final = "triton_final_response"
"""The parameter of a response that says whether it is the request's last."""

_PARAMETERS: Final = "parameters"
_MOST_PARAMETERS: Final = 256
_UNSERVED: Final[unserved.Unserved] = {
    **unserved.OF_COMPLETION,
    "lora_name": ("",),
    "prompt_logprobs": (),
}
# What the protocol's clients say with a request beside its sampling: the values that are no
# wish for what is not here. Triton's priorities are numbers, the names are our own.
_OF_REQUEST: Final[Mapping[str, tuple[object, ...]]] = {
    "priority": (0, *RequestClass),
    "sequence_id": (0, ""),
}
_TIMEOUT: Final = "timeout"
_MICROSECONDS: Final = 1e-6
_FLAGS: Final = {"true": True, "false": False}


class _Beside(LevelFields):
    """What is said along with the sampling parameters."""

    cache_salt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request that was understood, but not checked against the model."""

    request: GenerationRequest
    given_id: str
    """What each response gives back; it may be empty."""
    is_stream: bool
    """Whether each piece is a response of its own."""
    echoes: bool
    """Whether the text begins with the prompt."""
    outputs: frozenset[str]
    """The tensors that are wanted."""
    timeout_s: float | None
    names: Mapping[str, str]
    """How to call the request's fields, see :func:`router.frontend.field_names.renamed`."""

    @property
    def num_choices(self) -> int:
        """How many answers there are to be."""
        return self.request.sampling.num_choices


def read_request(
    message: service_pb2.ModelInferRequest,
    *,
    num_bytes: int,
    max_model_len: int,
    tenant: Tenant,
) -> Asked:
    """What a client asks for; ``num_bytes`` is its size on the wire.

    Raises:
        InvalidRequestError: a tensor or a parameter is wrong, or not served.
        ModelNotFoundError: the model has no such version.
    """
    check_version(message.model_version)
    given = _read_parameters(message.parameters)
    inputs = tensors.read_inputs(message)
    is_stream = inputs.flags.get(tensors.STREAM, False)
    said, path = given, _PARAMETERS
    text = inputs.texts.get(tensors.SAMPLING_PARAMETERS)
    if text is not None:  # then those of the request say nothing, though clients send both
        path = tensors.SAMPLING_PARAMETERS
        said = _parsed(text, max_model_len, path)
    content = {
        name: _parsed(value, max_model_len, f"{path}.{name}")
        if name in OBJECTS and isinstance(value, str)
        else _converted(name, value)
        for name, value in said.items()
    }
    beside = validated(_Beside, content, path)
    sampling, names = _read_sampling(content, path)
    num_choices = sampling.num_choices
    if num_choices > MAX_CHOICES:  # something is kept for each before ranges are checked
        raise InvalidRequestError(
            f"must be at most {MAX_CHOICES}, is {num_choices}", field=f"{path}.n"
        )
    if is_stream and num_choices > 1:
        raise InvalidRequestError("is for answers in one piece", field=f"{path}.n")
    if is_stream and sampling.num_drawn > 1:
        raise InvalidRequestError("is for answers in one piece", field=f"{path}.best_of")
    outputs = _read_outputs(message, inputs)
    if sampling.logprobs is None and outputs & {tensors.LOGPROBS, tensors.CUMULATIVE_LOGPROB}:
        sampling = replace(sampling, logprobs=0)
    return Asked(
        request=GenerationRequest(
            prompt=TextPrompt(inputs.texts[tensors.TEXT_INPUT]),
            sampling=sampling,
            model=message.model_name,
            request_id=message.id,
            tenant=tenant,
            cache_salt=beside.cache_salt or "",
            level=beside.level,
            return_prompt_token_ids=is_stream and tensors.NUM_INPUT_TOKENS in outputs,
            num_bytes=num_bytes,
        ),
        given_id=message.id,
        is_stream=is_stream,
        echoes=_echoes(inputs.flags.get(tensors.EXCLUDE_INPUT), is_stream=is_stream),
        outputs=outputs,
        timeout_s=_read_timeout(given),
        names={
            **names,
            **{name: f"{path}.{name}" for name in _Beside.model_fields},
            "sampling.": f"{path}.",
            "text": tensors.TEXT_INPUT,
            "request_id": "id",
        },
    )


def check_version(version: str) -> None:
    """Raise ModelNotFoundError for another than the one there is; none is this one."""
    if version not in ("", VERSION):
        raise ModelNotFoundError(f"no version {version[:64]!r} here; there is {VERSION!r}")


def _echoes(is_excluded: bool | None, *, is_stream: bool) -> bool:
    if not is_stream:
        return not is_excluded
    if is_excluded is False:
        raise InvalidRequestError("is only for answers in one piece", field=tensors.EXCLUDE_INPUT)
    return False


def _read_outputs(message: service_pb2.ModelInferRequest, inputs: Inputs) -> frozenset[str]:
    """Those that are named; where none is, the text and what else the inputs want."""
    num_outputs, most = len(message.outputs), len(tensors.OUTPUTS)
    if num_outputs > most:
        raise InvalidRequestError(
            f"has {num_outputs} items, more than the {most} that there are", field="outputs"
        )
    for index, output in enumerate(message.outputs):
        tensors.refuse_parameters(output.parameters, f"outputs[{index}]")
        if output.name not in tensors.OUTPUTS:
            raise InvalidRequestError(
                f"{output.name[:64]!r} is none of {', '.join(tensors.OUTPUTS)}",
                field=f"outputs[{index}].name",
            )
    if message.outputs:
        return frozenset(output.name for output in message.outputs)
    wanted = (name for name in tensors.OUTPUTS if inputs.flags.get(f"return_{name}"))
    return frozenset({tensors.TEXT_OUTPUT, *wanted})


def _read_parameters(
    parameters: Mapping[str, service_pb2.InferParameter],
) -> Mapping[str, object]:
    """Their plain values."""
    if len(parameters) > _MOST_PARAMETERS:
        raise InvalidRequestError(
            f"has {len(parameters)} items, more than {_MOST_PARAMETERS}", field=_PARAMETERS
        )
    given: dict[str, object] = {}
    for name, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is not None:
            given[name] = getattr(parameter, kind)
    for name, neutral in _OF_REQUEST.items():
        if given.get(name) is not None and given[name] not in neutral:
            raise InvalidRequestError("is not supported", field=f"{_PARAMETERS}.{name}")
    return given


def _read_timeout(given: Mapping[str, object]) -> float | None:
    """In seconds; clients say it in microseconds, and 0 for none."""
    said = given.get(_TIMEOUT)
    if said is None:
        return None
    if isinstance(said, bool) or not isinstance(said, int) or said < 0:
        raise InvalidRequestError(
            "should be a number of microseconds", field=f"{_PARAMETERS}.{_TIMEOUT}"
        )
    return said * _MICROSECONDS or None


def _parsed(text: str, max_model_len: int, field: str) -> Mapping[str, object]:
    """The object that a text says."""
    try:
        return parse(text.encode(), max_model_len)
    except InvalidRequestError as error:
        message = error.message.removeprefix(f"{FIELD}: ")
        raise InvalidRequestError(message, field=field) from None


def _read_sampling(
    content: Mapping[str, object], path: str
) -> tuple[SamplingOptions, Mapping[str, str]]:
    """The options, and how to call the parts of their constraint."""
    try:
        unserved.refuse(content, _UNSERVED)
        said = read_constraint(content)
        sampling = read_sampling(
            content,
            max_tokens=DEFAULT_MAX_TOKENS,
            constraint=None if said is None else said.constraint,
        )
    except InvalidRequestError as error:
        message = error.message.removeprefix(f"{error.field}: ")
        raise InvalidRequestError(message, field=f"{path}.{error.field}") from None
    names = {} if said is None else said.names
    return sampling, {ours: f"{path}.{theirs}" for ours, theirs in names.items()}


def _converted(name: str, value: object) -> object:
    """A number or a flag that was said as a text. What is none stays, and is refused as such."""
    if not isinstance(value, str) or name not in _PLAIN_TYPES:
        return value
    kind = _PLAIN_TYPES[name]
    if kind is bool:
        return _FLAGS.get(value.lower(), value)
    try:
        return kind(value)
    except ValueError:
        return value


def _plain_type(hint: object) -> type | None:
    """int, float or bool where a parameter is nothing else, or left out."""
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    return next((kind for kind in (bool, int, float) if kinds == [kind]), None)


_PLAIN_TYPES: Final = {
    name: kind
    for said in (SamplingOptions, ServiceLevel)
    for name, hint in get_type_hints(said).items()
    if name in SERVED | set(ServiceLevel._fields) and (kind := _plain_type(hint)) is not None
}

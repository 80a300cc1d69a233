"""The tensors of a model that generates text: which there are, how one is read and written. Pure.

They are those of Triton's vLLM backend. Each input has one element. Lengths are looked at before
what they are the lengths of, and nothing of what a client says is copied until it is known to fit.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from diptych.errors import InvalidRequestError
from diptych.open_inference import service_pb2

BYTES: Final = "BYTES"
BOOL: Final = "BOOL"
UINT32: Final = "UINT32"
FP32: Final = "FP32"

TEXT_INPUT: Final = "text_input"
STREAM: Final = "stream"
SAMPLING_PARAMETERS: Final = "sampling_parameters"
EXCLUDE_INPUT: Final = "exclude_input_in_output"
TEXT_OUTPUT: Final = "text_output"
FINISH_REASON: Final = "finish_reason"
NUM_INPUT_TOKENS: Final = "num_input_tokens"
NUM_OUTPUT_TOKENS: Final = "num_output_tokens"
LOGPROBS: Final = "logprobs"
CUMULATIVE_LOGPROB: Final = "cumulative_logprob"

_LENGTH: Final = struct.Struct("<I")  # before each element of BYTES
_MOST_SHOWN: Final = 64  # characters of what a client wrote, in an error


class TensorSpec(NamedTuple):
    """What is said of a tensor before there is one. ``size`` is -1 where it is one per choice."""

    name: str
    datatype: str
    size: int = 1
    is_optional: bool = True


INPUTS: Final[Mapping[str, TensorSpec]] = {
    spec.name: spec
    for spec in (
        TensorSpec(TEXT_INPUT, BYTES, is_optional=False),
        TensorSpec(STREAM, BOOL),
        TensorSpec(SAMPLING_PARAMETERS, BYTES),
        TensorSpec(EXCLUDE_INPUT, BOOL),
        TensorSpec(f"return_{FINISH_REASON}", BOOL),
        TensorSpec(f"return_{NUM_INPUT_TOKENS}", BOOL),
        TensorSpec(f"return_{NUM_OUTPUT_TOKENS}", BOOL),
        TensorSpec(f"return_{LOGPROBS}", BOOL),
        TensorSpec(f"return_{CUMULATIVE_LOGPROB}", BOOL),
    )
}
OUTPUTS: Final[Mapping[str, TensorSpec]] = {
    spec.name: spec
    for spec in (
        TensorSpec(TEXT_OUTPUT, BYTES, size=-1),
        TensorSpec(FINISH_REASON, BYTES, size=-1),
        TensorSpec(NUM_INPUT_TOKENS, UINT32),
        TensorSpec(NUM_OUTPUT_TOKENS, UINT32, size=-1),
        TensorSpec(LOGPROBS, BYTES, size=-1),
        TensorSpec(CUMULATIVE_LOGPROB, FP32, size=-1),
    )
}
# Inputs of the same backend that nothing here serves.
_UNSERVED: Final = frozenset({"image", "embedding_request"})


class Inputs(NamedTuple):
    """The elements of a request's inputs, by the names of :data:`INPUTS`."""

    texts: Mapping[str, str]
    flags: Mapping[str, bool]


def read_inputs(request: service_pb2.ModelInferRequest) -> Inputs:
    """What the inputs say. Raises InvalidRequestError with the tensor's name and what of it."""
    num_inputs, raw = len(request.inputs), request.raw_input_contents
    if num_inputs > len(INPUTS):
        raise InvalidRequestError(
            f"has {num_inputs} items, more than the {len(INPUTS)} that there are", field="inputs"
        )
    if raw and len(raw) != num_inputs:
        raise InvalidRequestError(
            f"has {len(raw)} items for {num_inputs} inputs", field="raw_input_contents"
        )
    texts: dict[str, str] = {}
    flags: dict[str, bool] = {}
    for index, tensor in enumerate(request.inputs):
        spec = _spec_of(tensor, index)
        if spec.name in texts or spec.name in flags:
            raise InvalidRequestError("comes twice", field=spec.name)
        _check_form(tensor, spec)
        content = raw[index] if raw else None
        if spec.datatype == BYTES:
            texts[spec.name] = _read_text(tensor, content)
        else:
            flags[spec.name] = _read_flag(tensor, content)
    if TEXT_INPUT not in texts:
        raise InvalidRequestError("is required", field=TEXT_INPUT)
    return Inputs(texts, flags)


def add_texts(response: service_pb2.ModelInferResponse, name: str, texts: Sequence[str]) -> None:
    """Add an output of BYTES."""
    encoded = [text.encode() for text in texts]
    raw = b"".join(_LENGTH.pack(len(each)) + each for each in encoded)
    _add(response, name, len(texts), raw)


def add_counts(response: service_pb2.ModelInferResponse, name: str, counts: Sequence[int]) -> None:
    """Add an output of UINT32."""
    _add(response, name, len(counts), struct.pack(f"<{len(counts)}I", *counts))


def add_numbers(
    response: service_pb2.ModelInferResponse, name: str, numbers: Sequence[float]
) -> None:
    """Add an output of FP32."""
    _add(response, name, len(numbers), struct.pack(f"<{len(numbers)}f", *numbers))


def _add(response: service_pb2.ModelInferResponse, name: str, size: int, raw: bytes) -> None:
    response.outputs.add(name=name, datatype=OUTPUTS[name].datatype, shape=[size])
    response.raw_output_contents.append(raw)


def _spec_of(tensor: service_pb2.ModelInferRequest.InferInputTensor, index: int) -> TensorSpec:
    spec = INPUTS.get(tensor.name)
    if spec is not None:
        return spec
    if tensor.name in _UNSERVED:
        raise InvalidRequestError("is not supported yet", field=tensor.name)
    raise InvalidRequestError(
        f"{tensor.name[:_MOST_SHOWN]!r} is none of {', '.join(INPUTS)}",
        field=f"inputs[{index}].name",
    )


def _check_form(tensor: service_pb2.ModelInferRequest.InferInputTensor, spec: TensorSpec) -> None:
    refuse_parameters(tensor.parameters, spec.name)
    if tensor.datatype != spec.datatype:
        raise InvalidRequestError(
            f"should be {spec.datatype}, is {tensor.datatype[:_MOST_SHOWN]!r}",
            field=f"{spec.name}.datatype",
        )
    if len(tensor.shape) != 1:
        raise InvalidRequestError(
            f"should be [1], has {len(tensor.shape)} dimensions", field=f"{spec.name}.shape"
        )
    if tensor.shape[0] != 1:
        raise InvalidRequestError(
            f"should be [1], is [{tensor.shape[0]}]", field=f"{spec.name}.shape"
        )


def refuse_parameters(given: Mapping[str, object], name: str) -> None:
    """No tensor has any: those that there are ask for shared memory, or for classes.

    Raises InvalidRequestError.
    """
    if given:
        first = min(given)[:_MOST_SHOWN]
        raise InvalidRequestError("is not supported", field=f"{name}.parameters.{first}")


def _read_text(tensor: service_pb2.ModelInferRequest.InferInputTensor, raw: bytes | None) -> str:
    data = _element_of(tensor, raw)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidRequestError("not valid UTF-8", field=tensor.name) from None


def _element_of(tensor: service_pb2.ModelInferRequest.InferInputTensor, raw: bytes | None) -> bytes:
    """The bytes of its one element, which has to be all that there is."""
    if raw is None:
        _check_size(tensor, len(tensor.contents.bytes_contents))
        return tensor.contents.bytes_contents[0]
    _check_no_contents(tensor)
    if len(raw) < _LENGTH.size:
        raise InvalidRequestError(
            f"has {len(raw)} bytes, of which the first {_LENGTH.size} say the length",
            field=tensor.name,
        )
    (said,) = _LENGTH.unpack_from(raw)
    if said != len(raw) - _LENGTH.size:
        raise InvalidRequestError(
            f"says that {said} bytes follow, and {len(raw) - _LENGTH.size} do", field=tensor.name
        )
    return raw[_LENGTH.size :]


def _read_flag(tensor: service_pb2.ModelInferRequest.InferInputTensor, raw: bytes | None) -> bool:
    if raw is None:
        _check_size(tensor, len(tensor.contents.bool_contents))
        return tensor.contents.bool_contents[0]
    _check_no_contents(tensor)
    if raw not in (b"\0", b"\1"):
        shown = f"{raw[0]}" if len(raw) == 1 else f"{len(raw)} bytes"
        raise InvalidRequestError(f"should be one byte, 0 or 1, is {shown}", field=tensor.name)
    return raw == b"\1"


def _check_size(tensor: service_pb2.ModelInferRequest.InferInputTensor, size: int) -> None:
    if size != 1:
        raise InvalidRequestError(
            f"should have 1 element of {tensor.datatype}, has {size}",
            field=f"{tensor.name}.contents",
        )


def _check_no_contents(tensor: service_pb2.ModelInferRequest.InferInputTensor) -> None:
    if tensor.HasField("contents"):
        raise InvalidRequestError(
            "cannot go with raw_input_contents", field=f"{tensor.name}.contents"
        )

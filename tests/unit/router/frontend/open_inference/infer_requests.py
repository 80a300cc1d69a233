"""Inference requests as clients of Triton write them."""

import json
import struct
from typing import Any

from diptych.open_inference import service_pb2

Tensor = service_pb2.ModelInferRequest.InferInputTensor


def raw_text(text: str | bytes) -> bytes:
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<I", len(data)) + data


def tensor(name: str, datatype: str = "BYTES", shape: tuple[int, ...] = (1,)) -> Tensor:
    return Tensor(name=name, datatype=datatype, shape=shape)


def request(
    *more: tuple[Tensor, bytes], text: str = "Once", **sampling: Any
) -> service_pb2.ModelInferRequest:
    """One with raw contents: the text, what is said of sampling, and ``more``."""
    given = [(tensor("text_input"), raw_text(text)), *more]
    if sampling:
        given.append((tensor("sampling_parameters"), raw_text(json.dumps(sampling))))
    return service_pb2.ModelInferRequest(
        model_name="m",
        inputs=[each for each, _ in given],
        raw_input_contents=[raw for _, raw in given],
    )


def flag(name: str, value: bool = True) -> tuple[Tensor, bytes]:
    return tensor(name, "BOOL"), b"\1" if value else b"\0"

"""Tensors that are what they say are read; any other is refused by what is wrong with it."""

import struct
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.errors import InvalidRequestError
from diptych.open_inference import service_pb2
from router.frontend.open_inference.tensors import INPUTS, add_counts, add_texts, read_inputs
from tests.unit.router.frontend.open_inference.infer_requests import (
    flag,
    raw_text,
    request,
    tensor,
)

Infer = service_pb2.ModelInferRequest


def typed(**contents: list[bytes] | list[bool]) -> Infer:
    """A text whose elements come in lists instead of raw."""
    made = Infer(inputs=[tensor("text_input")])
    for name, values in contents.items():
        getattr(made.inputs[0].contents, name).extend(values)
    return made


def test_each_input_is_read_by_its_name() -> None:
    read = read_inputs(request(flag("stream"), flag("return_finish_reason", False), text="Ünd"))
    assert read.texts == {"text_input": "Ünd"}
    assert read.flags == {"stream": True, "return_finish_reason": False}


def test_elements_may_come_in_lists() -> None:
    made = typed(bytes_contents=[b"Once"])
    made.inputs.add(name="stream", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
    read = read_inputs(made)
    assert (read.texts["text_input"], read.flags["stream"]) == ("Once", True)


def with_raw(raw: bytes, name: str = "text_input") -> Infer:
    made = request(flag("stream"))
    made.raw_input_contents[0 if name == "text_input" else 1] = raw
    return made


def with_first(**changed: object) -> Infer:
    made = request()
    for name, value in changed.items():
        if isinstance(value, list):
            made.inputs[0].ClearField("shape")
            made.inputs[0].shape.extend(value)
        else:
            setattr(made.inputs[0], name, value)
    return made


def with_shared_memory() -> Infer:
    made = request()
    made.inputs[0].parameters["shared_memory_region"].string_param = "mine"
    return made


def with_both_contents() -> Infer:
    made = request()
    made.inputs[0].contents.bytes_contents.append(b"Once")
    return made


def with_raw_left_out() -> Infer:
    made = request(flag("stream"))
    del made.raw_input_contents[1]
    return made


HOSTILE: dict[str, tuple[Callable[[], Infer], str, str]] = {
    "nothing": (Infer, "text_input", "is required"),
    "no text": (
        lambda: Infer(inputs=[tensor("stream", "BOOL")], raw_input_contents=[b"\0"]),
        "text_input",
        "is required",
    ),
    "another name": (lambda: with_first(name="x" * 9999), "inputs[0].name", "is none of"),
    "an image": (lambda: with_first(name="image"), "image", "is not supported yet"),
    "twice": (lambda: request((tensor("text_input"), raw_text("a"))), "text_input", "twice"),
    "datatype": (lambda: with_first(datatype="FP32"), "text_input.datatype", "should be BYTES"),
    "two of them": (lambda: with_first(shape=[2]), "text_input.shape", "is [2]"),
    "none of them": (lambda: with_first(shape=[0]), "text_input.shape", "is [0]"),
    "no shape": (lambda: with_first(shape=[]), "text_input.shape", "has 0 dimensions"),
    "a negative shape": (lambda: with_first(shape=[-1]), "text_input.shape", "is [-1]"),
    "a vast shape": (lambda: with_first(shape=[2**62]), "text_input.shape", f"is [{2**62}]"),
    "dimensions": (lambda: with_first(shape=[1] * 99_999), "text_input.shape", "99999 dimensions"),
    "many inputs": (lambda: Infer(inputs=[tensor("text_input")] * 50_000), "inputs", "has 50000"),
    "many raw": (lambda: Infer(raw_input_contents=[b""] * 50_000), "raw_input_contents", "50000"),
    "one raw too few": (with_raw_left_out, "raw_input_contents", "has 1 items for 2 inputs"),
    "both contents": (with_both_contents, "text_input.contents", "cannot go with"),
    "shared memory": (with_shared_memory, "text_input.parameters.shared_memory_region", "is not"),
    "no length": (lambda: with_raw(b"\1\0"), "text_input", "has 2 bytes"),
    "empty": (lambda: with_raw(b""), "text_input", "has 0 bytes"),
    "length too long": (
        lambda: with_raw(struct.pack("<I", 2**32 - 1) + b"ab"),
        "text_input",
        "says that 4294967295 bytes follow, and 2 do",
    ),
    "length too short": (
        lambda: with_raw(struct.pack("<I", 1) + b"ab"),
        "text_input",
        "says that 1",
    ),
    "two elements": (lambda: with_raw(raw_text("a") * 2), "text_input", "says that 1"),
    "no text of it": (lambda: with_raw(raw_text(b"\xff")), "text_input", "not valid UTF-8"),
    "a flag of two": (lambda: with_raw(b"\2", "stream"), "stream", "0 or 1, is 2"),
    "a flag of none": (lambda: with_raw(b"", "stream"), "stream", "is 0 bytes"),
    "a long flag": (lambda: with_raw(b"\1" * 9, "stream"), "stream", "is 9 bytes"),
    "no elements": (typed, "text_input.contents", "1 element of BYTES, has 0"),
    "two in a list": (lambda: typed(bytes_contents=[b"a", b"b"]), "text_input.contents", "has 2"),
    "another list": (lambda: typed(bool_contents=[True]), "text_input.contents", "has 0"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_wrong_with_a_tensor_is_named(case: str) -> None:
    make, field, reason = HOSTILE[case]
    with pytest.raises(InvalidRequestError) as caught:
        read_inputs(make())
    assert caught.value.field == field
    assert reason in caught.value.message
    assert len(caught.value.message) < 400


@given(
    st.lists(
        st.tuples(
            st.sampled_from([*INPUTS, "image", ""]),
            st.sampled_from(["BYTES", "BOOL", "UINT32", ""]),
            st.lists(st.integers(-1, 3), max_size=2),
            st.binary(max_size=9),
        ),
        max_size=9,
    ),
    st.integers(-1, 1),
)
def test_no_tensor_is_a_servers_error(
    given_tensors: list[tuple[str, str, list[int], bytes]], num_off: int
) -> None:
    made = Infer(
        inputs=[tensor(name, kind, tuple(shape)) for name, kind, shape, _ in given_tensors],
        raw_input_contents=[raw for *_, raw in given_tensors][: len(given_tensors) + num_off],
    )
    with suppress(InvalidRequestError):  # and nothing else
        assert "text_input" in read_inputs(made).texts


def test_outputs_are_written_as_elements_in_a_row() -> None:
    response = service_pb2.ModelInferResponse()
    add_texts(response, "text_output", ["é", ""])
    add_counts(response, "num_output_tokens", [3, 70_000])
    assert [(o.name, o.datatype, list(o.shape)) for o in response.outputs] == [
        ("text_output", "BYTES", [2]),
        ("num_output_tokens", "UINT32", [2]),
    ]
    assert list(response.raw_output_contents) == [
        raw_text("é") + raw_text(""),
        struct.pack("<II", 3, 70_000),
    ]

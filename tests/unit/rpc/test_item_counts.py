"""What would take long to parse is refused before it is."""

import pytest
from google.protobuf.message import Message

from diptych.errors import InvalidRequestError
from diptych.open_inference import service_pb2
from diptych.rpc.item_counts import MAX_ENTRIES, MAX_ITEMS, MAX_NESTED_BYTES, check_item_counts
from diptych.v1 import inference_pb2


def _refused(message_type: type[Message], data: bytes) -> str:
    """The field that is named."""
    with pytest.raises(InvalidRequestError) as caught:
        check_item_counts(message_type, data)
    return caught.value.field


def _infer(num_parameters: int) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(id="a" * 20_000)
    for index in range(num_parameters):
        request.parameters[str(index)].bool_param = True
    return request


def test_a_map_is_bounded_however_it_comes() -> None:
    """Also where what is said twice is put together, and where a text is not UTF-8."""
    check_item_counts(service_pb2.ModelInferRequest, _infer(MAX_ENTRIES).SerializeToString())
    above = _infer(MAX_ENTRIES + 1).SerializeToString()
    half = _infer(MAX_ENTRIES // 2 + 1).SerializeToString()
    for data in (above, half + half, above.replace(b"aa", b"\xff\xff")):
        assert _refused(service_pb2.ModelInferRequest, data) == "parameters"


def test_maps_of_numbers_and_within_lists_are_bounded() -> None:
    request = _infer(1)
    for _ in range(2):
        tensor = request.inputs.add()
    for index in range(MAX_ENTRIES + 1):
        tensor.parameters[str(index)].bool_param = True
    data = request.SerializeToString()
    assert _refused(service_pb2.ModelInferRequest, data) == "inputs[1].parameters"
    biased = inference_pb2.GenerateRequest()
    for index in range(MAX_ENTRIES + 1):
        biased.sampling.logit_bias[index << 16] = 1.0
    data = biased.SerializeToString()
    assert _refused(inference_pb2.GenerateRequest, data) == "sampling.logit_bias"


def test_maps_within_maps_are_bounded_together() -> None:
    request = inference_pb2.GenerateRequest()
    text = "a" * (MAX_NESTED_BYTES // 3)
    for name in ("a", "b"):
        schema = request.chat.tools.add(name=name).parameters
        schema.fields["inner"].struct_value.fields["text"].string_value = text
    check_item_counts(inference_pb2.GenerateRequest, request.SerializeToString())
    request.chat.template_arguments.fields["more"].string_value = text
    field = _refused(inference_pb2.GenerateRequest, request.SerializeToString())
    assert field.startswith("chat.")


def test_lists_of_messages_are_bounded_together() -> None:
    request = service_pb2.ModelInferRequest()
    for _ in range(MAX_ITEMS):
        request.inputs.add()
    check_item_counts(service_pb2.ModelInferRequest, request.SerializeToString())
    request.outputs.add()
    assert _refused(service_pb2.ModelInferRequest, request.SerializeToString()) == "outputs"


def test_lists_within_lists_count() -> None:
    request = inference_pb2.GenerateRequest()
    for _ in range(MAX_ITEMS // 2):
        request.chat.messages.add().content.add()
    request.chat.messages.add().content.add()
    field = _refused(inference_pb2.GenerateRequest, request.SerializeToString())
    assert field.startswith("chat.messages[")
    assert field.endswith(".content")


def test_what_holds_no_map_is_not_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.rpc.item_counts.twin_class", lambda *_, **__: pytest.fail("read"))
    request = inference_pb2.DetokenizeRequest(token_ids=[70_000] * 10_000)
    check_item_counts(inference_pb2.DetokenizeRequest, request.SerializeToString())
    check_item_counts(service_pb2.ModelInferRequest, b"\xff")


def test_what_is_no_message_is_refused() -> None:
    assert _refused(service_pb2.ModelInferRequest, b"\xff" * 20_000) == "request"

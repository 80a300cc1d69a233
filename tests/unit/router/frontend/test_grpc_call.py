"""How a front end over gRPC reads a request."""

import pytest

from diptych.errors import InvalidRequestError
from diptych.rpc.item_counts import MAX_ENTRIES
from diptych.v1 import inference_pb2
from router.frontend.grpc_call import read_message


def test_a_map_that_is_too_large_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.frontend.grpc_call.decode", lambda *_: pytest.fail("parsed"))
    request = inference_pb2.GenerateRequest()
    for token_id in range(MAX_ENTRIES + 1):
        request.sampling.logit_bias[token_id] = 1.0
    with pytest.raises(InvalidRequestError) as caught:
        read_message(inference_pb2.GenerateRequest, request.SerializeToString(), 2**20)
    assert caught.value.field == "sampling.logit_bias"

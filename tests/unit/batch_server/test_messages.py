"""What clients are told over gRPC: each thing in its place."""

from dataclasses import replace

import pytest
from google.protobuf.json_format import MessageToDict

from batch_server.records import Batch, LineError, StoredFile
from batch_server.rpc.messages import batch_message, file_message, read_asked
from batch_server.status import BatchStatus
from diptych.v1 import batches_pb2 as public

NEW = Batch(
    batch_id="batch_1",
    tenant="alice",
    endpoint="/v1/completions",
    input_file_id="file-in",
    completion_window="30m",
    status=BatchStatus.VALIDATING,
    created_s=10,
    expires_s=20,
)
ENDED = replace(
    NEW,
    endpoint="/v1/embeddings",
    completion_window="7d",
    status=BatchStatus.EXPIRED,
    expires_s=50,
    moved_s={BatchStatus.IN_PROGRESS: 20, BatchStatus.FINALIZING: 50, BatchStatus.EXPIRED: 60},
    output_file_id="file-out",
    error_file_id="file-errors",
    metadata={"of": "us"},
    errors=[LineError("c", "m", "p", 7), LineError("empty_file", "none")],
    num_lines=6,
    num_completed=3,
    num_failed=2,
    num_unsent=1,
)


def told(batch: Batch) -> object:
    return MessageToDict(batch_message(batch), preserving_proto_field_name=True)


def test_a_batch_is_told_with_all_that_is_known_of_it() -> None:
    begun = {
        "id": "batch_1",
        "endpoint": "/v1/completions",
        "input_file_id": "file-in",
        "completion_window": "30m",
        "status": "BATCH_STATUS_VALIDATING",
        "created_s": "10",
        "expires_s": "20",
    }
    assert told(NEW) == begun
    assert told(ENDED) == {
        "id": "batch_1",
        "endpoint": "/v1/embeddings",
        "input_file_id": "file-in",
        "completion_window": "7d",
        "metadata": {"of": "us"},
        "status": "BATCH_STATUS_EXPIRED",
        "created_s": "10",
        "expires_s": "50",
        "moves": [
            {"status": "BATCH_STATUS_IN_PROGRESS", "at_s": "20"},
            {"status": "BATCH_STATUS_FINALIZING", "at_s": "50"},
            {"status": "BATCH_STATUS_EXPIRED", "at_s": "60"},
        ],
        "num_lines": 6,
        "num_completed": 3,
        "num_failed": 2,
        "output_file_id": "file-out",
        "error_file_id": "file-errors",
        "errors": [
            {"code": "c", "message": "m", "param": "p", "line": 7},
            {"code": "empty_file", "message": "none"},
        ],
    }


@pytest.mark.parametrize("status", BatchStatus)
def test_each_status_has_its_own_name(status: BatchStatus) -> None:
    moved = batch_message(replace(NEW, status=status, moved_s={status: 11}))
    assert public.BatchStatus.Name(moved.status) == f"BATCH_STATUS_{status.name}"
    assert [move.status for move in moved.moves] == [moved.status]


def test_a_file_is_told_as_it_is_stored() -> None:
    file = StoredFile(
        file_id="file-1",
        tenant="alice",
        purpose="batch",
        filename="in.jsonl",
        created_s=10,
        num_bytes=2**40,
    )
    message = file_message(file)
    assert (message.id, message.filename) == ("file-1", "in.jsonl")
    assert (message.num_bytes, message.created_s) == (2**40, 10)


@pytest.mark.parametrize("metadata", [{}, {"a": "1", "b": ""}])
def test_what_a_batch_is_to_be_reads_as_a_body_over_http(metadata: dict[str, str]) -> None:
    request = public.CreateBatchRequest(
        input_file_id="file-in",
        endpoint="/v1/responses",
        completion_window="24h",
        metadata=metadata,
    )
    assert read_asked(request) == {
        "input_file_id": "file-in",
        "endpoint": "/v1/responses",
        "completion_window": "24h",
        "metadata": metadata or None,
    }

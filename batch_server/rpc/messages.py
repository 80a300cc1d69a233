"""Files and batches as the messages that clients are told, and what they ask as members. Pure."""

from collections.abc import Mapping
from typing import Final

from batch_server.records import Batch, LineError, StoredFile
from batch_server.status import BatchStatus
from diptych.v1 import batches_pb2 as public

_STATUSES: Final[Mapping[BatchStatus, public.BatchStatus]] = {
    BatchStatus.VALIDATING: public.BATCH_STATUS_VALIDATING,
    BatchStatus.FAILED: public.BATCH_STATUS_FAILED,
    BatchStatus.IN_PROGRESS: public.BATCH_STATUS_IN_PROGRESS,
    BatchStatus.FINALIZING: public.BATCH_STATUS_FINALIZING,
    BatchStatus.COMPLETED: public.BATCH_STATUS_COMPLETED,
    BatchStatus.EXPIRED: public.BATCH_STATUS_EXPIRED,
    BatchStatus.CANCELLING: public.BATCH_STATUS_CANCELLING,
    BatchStatus.CANCELLED: public.BATCH_STATUS_CANCELLED,
}


def file_message(file: StoredFile) -> public.StoredFile:
    """One file."""
    return public.StoredFile(
        id=file.file_id,
        filename=file.filename,
        num_bytes=file.num_bytes,
        created_s=file.created_s,
    )


def batch_message(batch: Batch) -> public.Batch:
    """One batch, with how far it is."""
    return public.Batch(
        id=batch.batch_id,
        endpoint=batch.endpoint,
        input_file_id=batch.input_file_id,
        completion_window=batch.completion_window,
        metadata=batch.metadata,
        status=_STATUSES[batch.status],
        created_s=batch.created_s,
        expires_s=batch.expires_s,
        moves=[
            public.BatchMove(status=_STATUSES[status], at_s=at_s)
            for status, at_s in batch.moved_s.items()
        ],
        num_lines=batch.num_lines,
        num_completed=batch.num_completed,
        num_failed=batch.num_failed,
        output_file_id=batch.output_file_id or "",
        error_file_id=batch.error_file_id or "",
        errors=[_error_message(error) for error in batch.errors],
    )


def read_asked(message: public.CreateBatchRequest) -> Mapping[str, object]:
    """What a batch is to be, as the members of a body over HTTP."""
    return {
        "input_file_id": message.input_file_id,
        "endpoint": message.endpoint,
        "completion_window": message.completion_window,
        "metadata": dict(message.metadata) or None,
    }


def _error_message(error: LineError) -> public.BatchError:
    return public.BatchError(
        code=error.code, message=error.message, param=error.param or "", line=error.line or 0
    )

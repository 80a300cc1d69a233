"""Files and batches as the JSON that clients are told. Pure."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from batch_server.records import Batch, LineError, StoredFile
from batch_server.status import BatchStatus

Form = Mapping[str, object]
T = TypeVar("T")


def file_form(file: StoredFile) -> Form:
    """One file."""
    return {
        "id": file.file_id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_s,
        "expires_at": None,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_form(batch: Batch) -> Form:
    """One batch, with how far it is."""
    moved = {
        f"{status}_at": batch.moved_s.get(status)
        for status in BatchStatus
        if status is not BatchStatus.VALIDATING
    }
    errors = [_error_form(error) for error in batch.errors]
    return {
        "id": batch.batch_id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": str(batch.status),
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_s,
        "expires_at": batch.expires_s,
        **moved,
        "request_counts": {
            "total": batch.num_lines,
            "completed": batch.num_completed,
            "failed": batch.num_failed,
        },
        "metadata": batch.metadata,
    }


def list_form(forms: Sequence[Form], limit: int) -> Form:
    """A page of up to ``limit`` of ``forms``, which has one more where there is another page."""
    shown = forms[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(forms) > limit,
    }


def _error_form(error: LineError) -> Form:
    return error._asdict()

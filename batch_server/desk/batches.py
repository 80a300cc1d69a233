"""Batches of clients: made, told, listed, watched, cancelled."""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Final

from pydantic import Field

from batch_server.desk.checks import PageAsked, checked_page, not_found
from batch_server.desk.files import PURPOSE
from batch_server.desk.tenant_places import TenantPlaces
from batch_server.records import ENDPOINTS, Batch, Endpoint, new_id
from batch_server.runner.runner import Runner
from batch_server.status import ENDED, BatchStatus
from batch_server.store.batches import BatchStore
from batch_server.store.files import FileStore
from batch_server.store.tenant_room import NotAdded, TenantBounds
from diptych.errors import (
    RETRY_LATER_S,
    BatchNotOpenError,
    InvalidRequestError,
    QueueFullError,
    StorageFullError,
    WorkerDrainingError,
)
from router.frontend.http.body import StrictModel, validated

DEFAULT_LISTED: Final = 20
_MOST_LISTED: Final = 100
_MANY_S: Final = 60.0
_LOOK_S: Final = 0.5
_MOST_WATCHES: Final = 64
_MOST_OF_TENANT: Final = 16
_WINDOW: Final = re.compile(r"([1-9][0-9]{0,6})([smhd])")
_UNITS_S: Final[Mapping[str, int]] = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LONGEST_S: Final = 14 * 86_400

_Key = Annotated[str, Field(min_length=1, max_length=64)]
_Value = Annotated[str, Field(max_length=512)]


class _Asked(StrictModel):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Annotated[dict[_Key, _Value], Field(max_length=16)] | None = None
    output_expires_after: object = None


class BatchDesk:
    """Does what clients ask about batches. Event loop only."""

    def __init__(
        self,
        batches: BatchStore,
        files: FileStore,
        runner: Runner,
        bounds: TenantBounds,
        clock: Callable[[], float],
    ) -> None:
        """``clock``: Unix seconds."""
        self._batches = batches
        self._files = files
        self._runner = runner
        self._bounds = bounds
        self._clock = clock
        self._is_ending = False
        self._watching = TenantPlaces(
            "many batches are being watched", most_of_tenant=_MOST_OF_TENANT, most=_MOST_WATCHES
        )

    async def create(self, tenant: str, asked: Mapping[str, object]) -> Batch:
        """Store one and begin it.

        ``asked`` has the members of OpenAI's body. Raises InvalidRequestError, QueueFullError,
        StorageFullError.
        """
        body = validated(_Asked, asked)
        if body.output_expires_after is not None:
            raise InvalidRequestError("is not supported yet", field="output_expires_after")
        now_s = self._clock()
        batch = Batch(
            batch_id=new_id("batch", now_s),
            tenant=tenant,
            endpoint=_read_endpoint(body.endpoint),
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            status=BatchStatus.VALIDATING,
            created_s=int(now_s),
            expires_s=int(now_s) + read_window_s(body.completion_window),
            metadata=body.metadata,
        )
        await self._check_input(tenant, body.input_file_id)
        try:
            refusal = await self._batches.add(batch, self._bounds)
        except BaseException:  # the client left: what was stored all the same is run
            self._runner.begin(batch.batch_id)
            raise
        if refusal is not None:
            raise _error_of(refusal, self._bounds)
        self._runner.begin(batch.batch_id)
        return batch

    def asked_page(self, limit: int | None, after: str | None) -> PageAsked:
        """Of a list. Raises InvalidRequestError."""
        return checked_page(limit, after, _MOST_LISTED, kind="batch")

    async def page(self, tenant: str, asked: PageAsked) -> Sequence[Batch]:
        """Those of a page, the newest first, and one more where there is another page."""
        return await self._batches.page(tenant, asked.after, asked.limit + 1)

    async def find(self, tenant: str, batch_id: str) -> Batch:
        """How far one is. Raises NotFoundError."""
        batch = await self._batches.find(tenant, batch_id) if batch_id.isprintable() else None
        if batch is None:
            raise not_found("batch", batch_id)
        return batch

    @contextmanager
    def watching(self, tenant: str) -> Iterator[None]:
        """One of the tenant's places, for ``changes``. Raises QueueFullError."""
        with self._watching.taken(tenant):
            yield

    async def changes(self, tenant: str, batch_id: str) -> AsyncGenerator[Batch, None]:
        """How far one is, now and when that has changed, until it has ended.

        Raises NotFoundError, WorkerDrainingError.
        """
        told = None
        while told is None or told.status not in ENDED:
            if told is not None:
                await asyncio.sleep(_LOOK_S)
            if self._is_ending:
                raise WorkerDrainingError("the server shuts down", retry_after_s=RETRY_LATER_S)
            batch = await self.find(tenant, batch_id)
            if batch != told:
                yield batch
            told = batch

    def end(self) -> None:
        """The process is about to end: nobody watches any longer."""
        self._is_ending = True

    async def cancel(self, tenant: str, batch_id: str) -> Batch:
        """Send no more of its lines; those that were answered stay so.

        Raises NotFoundError, BatchNotOpenError.
        """
        is_id = batch_id.isprintable()
        try:
            batch = await self._batches.cancel(tenant, batch_id, self._clock()) if is_id else None
        finally:  # of a client that left it is stored all the same
            self._runner.look(batch_id)
        if batch is None:
            raise not_found("batch", batch_id)
        if batch.status not in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
            raise BatchNotOpenError(f"a batch that is {batch.status} cannot be cancelled")
        return batch

    async def _check_input(self, tenant: str, file_id: str) -> None:
        file = await self._files.find(tenant, file_id) if file_id.isprintable() else None
        if file is None:
            raise InvalidRequestError("is none of your files", field="input_file_id")
        if file.purpose != PURPOSE:
            raise InvalidRequestError(f"is a file for {file.purpose}", field="input_file_id")


def _error_of(refusal: NotAdded, bounds: TenantBounds) -> QueueFullError | StorageFullError:
    if refusal is NotAdded.OPEN:
        reason = f"{bounds.max_open} batches have not ended yet"
        return QueueFullError(reason, retry_after_s=_MANY_S)
    if refusal is NotAdded.RECORDS:
        reason = f"all batches themselves would have more than {bounds.max_record_bytes} bytes"
        advice = "delete results of some, then the oldest of these go"
        return StorageFullError(f"{reason}: {advice}", field="metadata")
    reason = f"all files and open batches would have more than {bounds.max_bytes} bytes"
    return StorageFullError(f"{reason}: delete some files", field="input_file_id")


def read_window_s(given: str) -> int:
    """Seconds of ``24h``, ``30m`` and so on. Raises InvalidRequestError."""
    found = _WINDOW.fullmatch(given)
    seconds = int(found[1]) * _UNITS_S[found[2]] if found else 0
    if not 0 < seconds <= _LONGEST_S:
        raise InvalidRequestError(
            "should be a time such as 24h, 30m or 7d, 14d at most", field="completion_window"
        )
    return seconds


def _read_endpoint(given: str) -> Endpoint:
    for endpoint in ENDPOINTS:
        if given == endpoint:
            return endpoint
    raise InvalidRequestError(f"should be one of {', '.join(ENDPOINTS)}", field="endpoint")

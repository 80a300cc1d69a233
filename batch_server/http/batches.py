"""``/v1/batches``: made, told, listed, cancelled."""

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Final

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from batch_server.http.asked import not_found, path_id, read_page, refuse_browsers
from batch_server.http.files import PURPOSE
from batch_server.http.forms import batch_form, list_form
from batch_server.records import ENDPOINTS, Batch, Endpoint, new_id
from batch_server.runner.runner import Runner
from batch_server.status import BatchStatus
from batch_server.store.batches import BatchStore, NotAdded, TenantBounds
from batch_server.store.files import FileStore
from diptych.errors import InvalidRequestError, QueueFullError
from router.frontend.http.body import StrictModel, parse, validated
from router.frontend.http.errors import RefusedError
from router.frontend.http.exchange import TENANT, Exchange

MAX_BODY_BYTES: Final = 2**16
_MANY_S: Final = 60.0
_DEFAULT_LISTED: Final = 20
_MOST_LISTED: Final = 100
_WINDOW: Final = re.compile(r"([1-9][0-9]{0,6})([smhd])")
_UNITS_S: Final[Mapping[str, int]] = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LONGEST_S: Final = 14 * 86_400

_Key = Annotated[str, Field(min_length=1, max_length=64)]
_Value = Annotated[str, Field(max_length=512)]


class _BatchBody(StrictModel):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Annotated[dict[_Key, _Value], Field(max_length=16)] | None = None
    output_expires_after: object = None


class BatchAnswers:
    """Answers about batches. Event loop only."""

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

    async def create(self, exchange: Exchange, data: bytes) -> None:
        """Store one and begin it."""
        body = validated(_BatchBody, parse(data, 0))
        if body.output_expires_after is not None:
            raise InvalidRequestError("is not supported yet", field="output_expires_after")
        tenant, now_s = exchange.tenant.name, self._clock()
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
        is_id = body.input_file_id.isprintable()
        file = await self._files.find(tenant, body.input_file_id) if is_id else None
        if file is None:
            raise InvalidRequestError("is none of your files", field="input_file_id")
        if file.purpose != PURPOSE:
            raise InvalidRequestError(f"is a file for {file.purpose}", field="input_file_id")
        try:
            refusal = await self._batches.add(batch, self._bounds)
        except BaseException:  # the client left: what was stored all the same is run
            self._runner.begin(batch.batch_id)
            raise
        if refusal is not None:
            raise _error_of(refusal, self._bounds)
        self._runner.begin(batch.batch_id)
        await exchange.send_json(batch_form(batch))

    async def list(self, request: Request) -> Response:
        """A page of the tenant's, the newest first."""
        asked = read_page(request.query_params, _DEFAULT_LISTED, _MOST_LISTED)
        tenant: str = request.scope[TENANT].name
        found = await self._batches.page(tenant, asked.after, asked.limit + 1)
        return JSONResponse(list_form([batch_form(batch) for batch in found], asked.limit))

    async def retrieve(self, request: Request) -> Response:
        """How far one is."""
        batch_id = path_id(request.path_params["batch_id"], "batch")
        batch = await self._batches.find(request.scope[TENANT].name, batch_id)
        if batch is None:
            raise not_found("batch", batch_id)
        return JSONResponse(batch_form(batch))

    async def cancel(self, request: Request) -> Response:
        """Send no more of its lines; those that were answered stay so."""
        refuse_browsers(request.headers)
        batch_id = path_id(request.path_params["batch_id"], "batch")
        tenant: str = request.scope[TENANT].name
        batch = await self._batches.cancel(tenant, batch_id, self._clock())
        if batch is None:
            raise not_found("batch", batch_id)
        if batch.status not in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
            raise RefusedError(
                409, f"a batch that is {batch.status} cannot be cancelled", "batch_not_open"
            )
        self._runner.cancel(batch_id)
        return JSONResponse(batch_form(batch))


def _error_of(refusal: NotAdded, bounds: TenantBounds) -> QueueFullError | RefusedError:
    if refusal is NotAdded.OPEN:
        reason = f"{bounds.max_open} batches have not ended yet"
        return QueueFullError(reason, retry_after_s=_MANY_S)
    reason = f"all files and open batches would have more than {bounds.max_bytes} bytes"
    return RefusedError(413, f"{reason}: delete some files", "storage_full", param="input_file_id")


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

"""``/v1/batches``: made, told, listed, cancelled."""

from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from batch_server.desk.batches import DEFAULT_LISTED, BatchDesk
from batch_server.http.asked import read_limit, refuse_browsers, tenant_of
from batch_server.http.forms import batch_form, list_form
from router.frontend.http.body import parse
from router.frontend.http.exchange import Exchange

MAX_BODY_BYTES: Final = 2**16


class BatchAnswers:
    """Answers about batches. Event loop only."""

    def __init__(self, batches: BatchDesk) -> None:
        self._batches = batches

    async def create(self, exchange: Exchange, data: bytes) -> None:
        """Store one and begin it."""
        batch = await self._batches.create(exchange.tenant.name, parse(data, 0))
        await exchange.send_json(batch_form(batch))

    async def list(self, request: Request) -> Response:
        """A page of the tenant's, the newest first."""
        query = request.query_params
        asked = self._batches.asked_page(read_limit(query, DEFAULT_LISTED), query.get("after"))
        found = await self._batches.page(tenant_of(request), asked)
        return JSONResponse(list_form([batch_form(batch) for batch in found], asked.limit))

    async def retrieve(self, request: Request) -> Response:
        """How far one is."""
        batch = await self._batches.find(tenant_of(request), request.path_params["batch_id"])
        return JSONResponse(batch_form(batch))

    async def cancel(self, request: Request) -> Response:
        """Send no more of its lines; those that were answered stay so."""
        refuse_browsers(request.headers)
        batch = await self._batches.cancel(tenant_of(request), request.path_params["batch_id"])
        return JSONResponse(batch_form(batch))

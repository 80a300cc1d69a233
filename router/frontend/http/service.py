"""What the HTTP API tells of the router itself: its model, its health, its metrics."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from diptych.errors import RETRY_LATER_S, ModelNotFoundError, NotServedError, NoWorkerError
from diptych.telemetry.metrics_server import readable_accept
from router.frontend.admission import Admission
from router.frontend.cluster_view import ClusterView
from router.frontend.http.errors import answer_to
from router.frontend.http.refusals import refusal
from router.generation.cluster_report import ClusterReport, members_of

_to_json: Final[Callable[[object], str]] = json.JSONEncoder(
    separators=(",", ":"), default=members_of
).encode


class ServiceAnswers:
    """Answers of one router. Event loop only."""

    def __init__(
        self,
        admission: Admission,
        registry: CollectorRegistry | None,
        is_serving: Callable[[], bool],
        view: ClusterView,
    ) -> None:
        """``is_serving`` says whether clients should come here at all.

        Without a ``registry`` no metrics are told.
        """
        self._admission = admission
        self._registry = registry
        self._is_serving = is_serving
        self._view = view
        self._written_report: ClusterReport | None = None
        self._cluster_body = b""
        self._scraping = asyncio.Lock()
        self._created_s = int(time.time())

    async def health(self, request: Request) -> Response:
        """200 only where a request could be served now."""
        if self._is_serving() and self._admission.is_ready:
            return JSONResponse({"status": "ok"})
        error = NoWorkerError("no request could be served now", retry_after_s=RETRY_LATER_S)
        return refusal(answer_to(error))

    async def models(self, request: Request) -> Response:
        """The one model, as a list."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """The model of that name."""
        name, served = request.path_params["name"], self._admission.model.name
        if name == served:
            return JSONResponse(self._model())
        missing = ModelNotFoundError(f"no model {name[:128]!r} here; there is {served!r}")
        return refusal(answer_to(missing))

    async def cluster(self, request: Request) -> Response:
        """How the pools are; written once for all who ask for the same report."""
        try:
            report = self._view.report()
        except NotServedError as error:
            return refusal(answer_to(error))
        if report is not self._written_report:
            self._written_report = report
            self._cluster_body = _to_json(report).encode()
        headers = {"content-type": "application/json", "cache-control": "no-store"}
        return Response(self._cluster_body, headers=headers)

    async def metrics(self, request: Request) -> Response:
        """The same as the metrics port serves; one after the other, as threads are few."""
        if self._registry is None:
            raise HTTPException(404)
        encode, kind = choose_encoder(readable_accept(request.headers.get("accept", "")))
        async with self._scraping:
            body = await asyncio.to_thread(encode, self._registry)
        return Response(body, headers={"content-type": kind})

    def _model(self) -> dict[str, object]:
        return {
            "id": self._admission.model.name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "diptych",
            "max_model_len": self._admission.max_model_len,
        }

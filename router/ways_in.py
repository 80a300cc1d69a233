"""What clients speak with, put together: gRPC, Triton's protocol and HTTP over one generator."""

import logging
from collections.abc import Callable
from typing import NamedTuple

from diptych.errors import InvalidApiKeyError
from diptych.rpc.connections import GRPC_SHARE, most_connections
from diptych.rpc.identity import Certificate
from diptych.rpc.server import MAX_CALLS_RATIO, Gate, Metadata, PublicEdge
from diptych.service_host import ServiceHost
from router.config import RouterConfig
from router.frontend.admission import Admission, most_open
from router.frontend.callers.callers import Anybody, Callers, authorization
from router.frontend.cluster_view import ClusterView
from router.frontend.generator import Generator
from router.frontend.grpc import SERVICE, InferenceServicer
from router.frontend.handed_over import HandedOver
from router.frontend.http.exchange import BodyRoom
from router.frontend.http.leaving import Leaving
from router.frontend.http.own_names import by_own_names
from router.frontend.http.routes import make_app
from router.frontend.http.server import HttpServer, bind, bounds_of
from router.frontend.http.service import ServiceAnswers
from router.frontend.open_inference.answering import Front
from router.frontend.open_inference.servicer import INFERRING, OpenInferenceServicer
from router.frontend.open_inference.servicer import SERVICE as OPEN_INFERENCE
from router.frontend.prompt_answers import PromptAnswers
from router.untaken import Untaken

logger = logging.getLogger(__name__)

GRPC_SERVICES = (SERVICE, OPEN_INFERENCE)

_SPARE_RPCS = 64  # listings, health checks, requests that are about to be refused
_MOST_CALLS = 2**31 - 1  # that gRPC can count
_GENERATING = INFERRING | {f"/{SERVICE}/Generate"}


class WaysIn(NamedTuple):
    """What stands behind every way in."""

    admission: Admission
    generator: Generator
    prompts: PromptAnswers
    callers: Callers
    view: ClusterView
    untaken: Untaken
    handed: HandedOver


def add_grpc(ways: WaysIn, host: ServiceHost, config: RouterConfig) -> None:
    """Serve clients on the host's own port."""
    admission, generator, prompts, callers, view, _, handed = ways
    max_bytes = config.max_request_bytes
    InferenceServicer(
        admission, generator, prompts, callers, view, max_request_bytes=max_bytes, handed=handed
    ).add_to(host.server)
    OpenInferenceServicer(
        Front(admission, generator, callers, max_bytes),
        max_streams=_most_streams(config),
        write_s=config.timers.client_write_s,
        handed=handed,
    ).add_to(host.server)


def open_http(
    ways: WaysIn,
    host: ServiceHost,
    config: RouterConfig,
    certificate: Certificate | None,
    is_serving: Callable[[], bool],
) -> HttpServer:
    """The HTTP API, whose port is taken now. Raises ConfigurationError."""
    admission, generator, prompts, callers, view, untaken, _ = ways
    timers = config.timers
    registry = host.registry if config.http_metrics else None
    service = ServiceAnswers(admission, registry, is_serving, view)
    room = BodyRoom(config.max_request_bytes, config.max_open_bytes, timers.client_write_s)
    bound = bind(host.host, config.http_port, timers, shares_port=config.shares_ports)
    bounds = bounds_of(config.max_request_bytes, timers.client_write_s)
    app = make_app(admission, generator, prompts, service, room, callers)
    app = by_own_names(app, host.host, callers)
    server = HttpServer(Leaving(app, is_serving), bound, bounds, untaken, certificate)
    logger.info("HTTP API", extra={"address": host.reachable(server.port)})
    return server


def gate_of(callers: Callers, refused: Callable[[str, Metadata], None]) -> Gate | None:
    """Nobody who is not known is let in; ``refused`` hears of who meant to generate, and why."""
    if isinstance(callers, Anybody):
        return None

    async def gate(method: str, metadata: Metadata) -> str:
        try:
            return (await callers.tenant(authorization(metadata))).name
        except InvalidApiKeyError as error:
            if method in _GENERATING:
                refused(error.reason, metadata)
            raise

    return gate


def public_edge(config: RouterConfig, gate: Gate | None = None) -> PublicEdge:
    """What clients may do to the server, so that all it takes and no more comes in.

    Raises ConfigurationError.
    """
    max_open = most_open(config) + _most_streams(config)
    max_served = max_open + _SPARE_RPCS
    # One that is somewhat too large hears in detail that it is.
    max_receive_bytes = config.max_request_bytes + config.max_request_bytes // 2
    return PublicEdge(
        max_connections=most_connections(GRPC_SHARE),
        # As many requests as are taken, and some to hear in detail why they are not.
        max_served=max_served,
        max_concurrent_rpcs=min(MAX_CALLS_RATIO * max_served, _MOST_CALLS),
        # One client alone does not take the last: others' health checks are answered.
        max_concurrent_streams=max_open + _SPARE_RPCS // 2,
        max_receive_bytes=max_receive_bytes,
        max_slow=max(1, config.max_open_bytes // max_receive_bytes),
        max_connection_age_s=config.max_connection_age_s,
        max_connection_grace_s=config.max_connection_grace_s,
        body_patience_s=config.timers.client_write_s,
        certificate=config.public_tls.read(),
        gate=gate,
        shares_port=config.shares_ports,
    )


def is_cluster_told(config: RouterConfig, callers: Callers) -> bool:
    """Whether clients hear how the pools are, by ``--cluster-view``."""
    if config.cluster_view == "unless-keyed":
        return isinstance(callers, Anybody)
    return config.cluster_view == "always"


def _most_streams(config: RouterConfig) -> int:
    """How many calls may be open that ask for something only now and then."""
    return config.max_concurrent

"""The router's process: puts the parts together, serves, drains."""

import asyncio
import itertools
import logging
import random
import secrets
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple

from diptych.errors import InvalidApiKeyError
from diptych.models import source as model_source
from diptych.process import Ready, settle
from diptych.progress import ConsoleProgress
from diptych.rpc.identity import Certificate
from diptych.rpc.server import Gate, Metadata, PublicEdge
from diptych.service_host import ServiceHost
from diptych.telemetry.sampling import Sampling
from diptych.timers import Timers
from router.client_settings import PublicTls
from router.cluster.members import Cluster
from router.config import RouterConfig
from router.discovery.choice import choose
from router.frontend.admission import Admission, most_open
from router.frontend.callers.callers import Anybody, Callers, authorization
from router.frontend.callers.choice import callers_of
from router.frontend.cluster_view import ClusterView
from router.frontend.generator import Generator
from router.frontend.grpc import SERVICE, InferenceServicer
from router.frontend.http.exchange import BodyRoom
from router.frontend.http.leaving import Leaving
from router.frontend.http.routes import make_app
from router.frontend.http.server import HttpServer, bind, bounds_of
from router.frontend.http.service import ServiceAnswers
from router.frontend.open_inference.answering import Front
from router.frontend.open_inference.servicer import INFERRING, OpenInferenceServicer
from router.frontend.open_inference.servicer import SERVICE as OPEN_INFERENCE
from router.frontend.prompt_answers import PromptAnswers
from router.frontend.quotas import Quotas
from router.frontend.served_model import ServedModel
from router.heartbeat import beat
from router.leaving import until_quiet
from router.metrics import RouterMetrics, read_placement, read_pools, read_room
from router.placement.cache_index import CacheIndex
from router.placement.departures import Departures
from router.placement.fair_queue import FairQueue
from router.placement.guarded import Guarded
from router.placement.output_lengths import OutputLengths
from router.placement.policy import LeastLoaded
from router.placement.predicted import Predicted
from router.placement.types import Policy
from router.placement.waiting_room import WaitingRoom
from router.request.dispatch import Services
from router.telemetry import Telemetry
from router.tenant_metrics import TenantMetrics

logger = logging.getLogger(__name__)

_PUMP_REST_S = 0.05  # before those are asked whom a pump did not reach
_SPARE_RPCS = 64  # listings, health checks, requests that are about to be refused
_MAX_CALLS_RATIO = 8  # all, with those whose clients take no answer, to those being answered
_MOST_CALLS = 2**31 - 1  # that gRPC can count
_GENERATING = INFERRING | {f"/{SERVICE}/Generate"}


async def serve(config: RouterConfig, stop: asyncio.Event, ready: Ready) -> None:
    """Serve until ``stop`` is set, then drain for ``timers.drain_s`` at most.

    Raises ConfigurationError.
    """
    discovery = choose(config, time.monotonic)
    callers = callers_of(config.api_keys, config.jwt)

    async def gate(method: str, metadata: Metadata) -> None:
        """Nobody who is not known is let in; who meant to generate is counted."""
        try:
            await callers.tenant(authorization(metadata))
        except InvalidApiKeyError as error:
            if method in _GENERATING:
                generator.refused(error.reason, metadata)
            raise

    edge = public_edge(config, None if isinstance(callers, Anybody) else gate)
    model = await asyncio.to_thread(_load_model, config)
    incarnation = secrets.token_hex(8)
    policy = _make_policy(config, incarnation)
    loop = asyncio.get_running_loop()
    room = WaitingRoom(
        max_waiting=config.max_queue,
        max_placed=config.max_concurrent,
        schedule=loop.call_soon,
        schedule_rest=partial(loop.call_later, _PUMP_REST_S),
        has_room=lambda: cluster.snapshot().has_room,
        departures=Departures(loop.time, random.random),
        queue=FairQueue(config.classes.weight_of),
        clock=loop.time,
        used=lambda request_class, used_s: metrics.engine_used(request_class, used_s),
    )
    cluster = Cluster(
        config,
        policy,
        incarnation=incarnation,
        text_digest=model.tokenizer.digest,
        on_change=room.pump_soon,
        now_s=lambda: host.tracing.now_s(),
    )
    async with (
        ServiceHost(
            config, instance_id=incarnation, public=edge, sampled=_sampling(config)
        ) as host,
        asyncio.TaskGroup() as tasks,
    ):
        background = _Background(tasks)
        services = Services(
            config=config,
            cluster=cluster,
            policy=policy,
            room=room,
            lengths=OutputLengths(),
            incarnation=incarnation,
            sequence_ids=itertools.count(1),
            spawn=background.spawn,
        )
        metrics = RouterMetrics(
            host.metrics, TenantMetrics(host.operator_metrics, config.max_tenant_series)
        )
        read_room(host.metrics, room)
        read_pools(host.metrics, cluster, discovery)
        read_placement(host.metrics, policy)
        telemetry = Telemetry(metrics, host.tracing, cluster, model.name, config.trace_slow_s)
        admission = Admission(model, cluster, config)
        quotas = Quotas(config.quota.limits, loop.time, metrics.quota_refused)
        generator = Generator(admission, quotas, services, telemetry)
        prompts = PromptAnswers(admission, quotas, services, telemetry)
        view = _make_view(config, cluster, room, metrics, admission, callers)
        servicer = InferenceServicer(
            admission, generator, prompts, callers, view, max_request_bytes=config.max_request_bytes
        )
        servicer.add_to(host.server)
        OpenInferenceServicer(
            Front(admission, generator, callers, config.max_request_bytes),
            max_streams=_most_streams(config),
            write_s=config.timers.client_write_s,
        ).add_to(host.server)
        http = None
        if config.http:
            front = _HttpFront(admission, generator, prompts, callers, view, edge.certificate)
            http = _make_http(config, host, front, stop)
        # Not guarded: a router that lost sight of its workers must not look healthy.
        watching = tasks.create_task(cluster.run(discovery), name="cluster")
        knowing = tasks.create_task(callers.run(), name="callers")
        viewing = tasks.create_task(view.run(), name="cluster-view")
        beating = tasks.create_task(_beat(config), name="heartbeat")
        if http is not None:
            tasks.create_task(http.serve(), name="http")
        settle()
        await host.start([SERVICE, OPEN_INFERENCE], {} if http is None else {"http": http.port})
        ready(host.port)
        telling = tasks.create_task(_tell_ready(host, cluster), name="readiness")
        await stop.wait()
        telling.cancel()
        await host.set_serving(False)
        await _see_off(admission, config.timers, loop.time)
        await _drain(host, http, admission, config.timers)
        background.stop()
        knowing.cancel()
        viewing.cancel()
        beating.cancel()
        await admission.close()
        watching.cancel()


def public_edge(config: RouterConfig, gate: Gate | None = None) -> PublicEdge:
    """What clients may do to the server, so that all it takes and no more comes in.

    Raises ConfigurationError.
    """
    max_open = most_open(config) + _most_streams(config)
    max_served = max_open + _SPARE_RPCS
    return PublicEdge(
        # As many requests as are taken, and some to hear in detail why they are not.
        max_served=max_served,
        max_concurrent_rpcs=min(_MAX_CALLS_RATIO * max_served, _MOST_CALLS),
        # One client alone does not take the last: others' health checks are answered.
        max_concurrent_streams=max_open + _SPARE_RPCS // 2,
        # One that is somewhat too large hears in detail that it is.
        max_receive_bytes=config.max_request_bytes + config.max_request_bytes // 2,
        max_connection_age_s=config.max_connection_age_s,
        max_connection_grace_s=config.max_connection_grace_s,
        body_patience_s=config.timers.client_write_s,
        certificate=_certificate(config.public_tls),
        gate=gate,
        shares_port=config.shares_ports,
    )


def _most_streams(config: RouterConfig) -> int:
    """How many calls may be open that ask for something only now and then."""
    return config.max_concurrent


def _sampling(config: RouterConfig) -> Sampling:
    return Sampling(
        config.trace_sample_ratio,
        config.trace_caller_per_s,
        holds=config.trace_slow_s is not None,
    )


def _certificate(files: PublicTls) -> Certificate | None:
    """Raises ConfigurationError."""
    if files.certificate is None or files.key is None:
        return None
    return Certificate("public-tls", files.certificate, files.key)


async def _beat(config: RouterConfig) -> None:
    if config.beats_to is not None:
        await beat(config.beats_to, config.timers.heartbeat_s)


async def _tell_ready(host: ServiceHost, cluster: Cluster) -> None:
    """Say SERVING once a worker was seen.

    And go on saying so if all are lost: a client learns more from NO_WORKER than from
    a balancer without routers.
    """
    await cluster.wait_found()
    await host.set_serving(True)
    logger.info("router serves")


class _Background:
    """Tasks that outlive a request: leases' streams."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._group = tasks
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run ``work``; an error in it is a bug, which is logged and does not spread."""
        task = self._group.create_task(self._guarded(work), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop(self) -> None:
        """Cancel all."""
        for task in self._tasks:
            task.cancel()

    @staticmethod
    async def _guarded(work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:
            logger.exception("background task crashed")


def _make_policy(config: RouterConfig, incarnation: str) -> Policy:
    plain = LeastLoaded(
        CacheIndex(config.prefix_memory_blocks),
        local_below_tokens=config.local_prefill_below_tokens,
        allow_local=config.allow_local_prefill,
        allow_recompute=config.allow_recompute,
        router_incarnation=incarnation,
    )
    if config.placement == "least-loaded":
        return plain
    return Guarded(Predicted(plain, random.random), plain)


def _make_view(
    config: RouterConfig,
    cluster: Cluster,
    room: WaitingRoom,
    metrics: RouterMetrics,
    admission: Admission,
    callers: Callers,
) -> ClusterView:
    return ClusterView(
        admission.model.name,
        cluster.overview,
        room,
        time.monotonic,
        ttft=metrics.requests.ttft_seconds,
        itl=metrics.requests.itl_seconds,
        is_told=is_cluster_told(config, callers),
    )


def is_cluster_told(config: RouterConfig, callers: Callers) -> bool:
    """Whether clients hear how the pools are, by ``--cluster-view``."""
    if config.cluster_view == "unless-keyed":
        return isinstance(callers, Anybody)
    return config.cluster_view == "always"


def _load_model(config: RouterConfig) -> ServedModel:
    cache_dir = config.cache_dir or model_source.DEFAULT_CACHE_DIR
    with ConsoleProgress() as progress:
        source = model_source.resolve(config.model, cache_dir, progress)
    name = config.served_model_name or source.name
    return ServedModel.from_folder(
        name, source.folder, config.answer_form, inert_contents=config.has_inert_contents
    )


class _HttpFront(NamedTuple):
    """What the HTTP API stands on, as gRPC does."""

    admission: Admission
    generator: Generator
    prompts: PromptAnswers
    callers: Callers
    view: ClusterView
    certificate: Certificate | None


def _make_http(
    config: RouterConfig, host: ServiceHost, front: _HttpFront, stop: asyncio.Event
) -> HttpServer:
    """The HTTP API, whose port is taken now. Raises ConfigurationError."""
    timers = config.timers
    registry = host.registry if config.http_metrics else None

    def is_serving() -> bool:
        return not stop.is_set()

    service = ServiceAnswers(front.admission, registry, is_serving, front.view)
    room = BodyRoom(config.max_request_bytes, config.max_open_bytes, timers.client_write_s)
    bound = bind(host.host, config.http_port, timers, shares_port=config.shares_ports)
    bounds = bounds_of(config.max_request_bytes, timers.client_write_s)
    app = make_app(front.admission, front.generator, front.prompts, service, room, front.callers)
    server = HttpServer(Leaving(app, is_serving), bound, bounds, front.certificate)
    logger.info("HTTP API", extra={"address": host.reachable(server.port)})
    return server


async def _see_off(admission: Admission, timers: Timers, clock: Callable[[], float]) -> None:
    """Serve clients until they have gone elsewhere; those who stay hear why they have to."""
    if not await until_quiet(lambda: admission.num_arrived, timers, clock):
        logger.info("clients go on asking a router that ends: their requests are refused")
        admission.drain()
        await asyncio.sleep(timers.lame_duck_s)


async def _drain(
    host: ServiceHost, http: HttpServer | None, admission: Admission, timers: Timers
) -> None:
    """Send clients elsewhere (GOAWAY) and let what runs finish; then cancel what is left.

    What comes with the GOAWAY is still taken, for as long as a lame duck's.
    """
    patience_s = timers.drain_s
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(host.server.stop(patience_s), name="goaway")
        if http is not None:
            tasks.create_task(http.stop(patience_s), name="http-drain")
        try:
            async with asyncio.timeout(patience_s):
                await asyncio.sleep(timers.lame_duck_s)
                admission.drain()
                await admission.wait_idle()
        except TimeoutError:
            logger.warning("requests were cut off", extra={"num_open": admission.num_open})
        await host.server.stop(0)  # who only watches our health, too
    await admission.wait_idle()  # those that were cancelled free what they hold

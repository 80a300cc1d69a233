"""The router's process: puts the parts together, serves, drains."""

import asyncio
import itertools
import logging
import random
import secrets
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from diptych.models import source as model_source
from diptych.process import Ready, settle
from diptych.progress import ConsoleProgress, abandonable
from diptych.service_host import ServiceHost
from diptych.start_up import unless_stopped
from diptych.telemetry.sampling import Sampling
from diptych.timers import Timers
from router.cluster.members import Cluster
from router.config import RouterConfig
from router.discovery.choice import choose
from router.frontend.admission import Admission
from router.frontend.callers.callers import Callers
from router.frontend.callers.choice import callers_of
from router.frontend.cluster_view import ClusterView
from router.frontend.generator import Generator
from router.frontend.handed_over import HandedOver
from router.frontend.http.server import HttpServer
from router.frontend.prompt_answers import PromptAnswers
from router.frontend.quotas import Quotas
from router.frontend.served_model import ServedModel
from router.heartbeat import beat
from router.leaving import until_quiet
from router.metrics import RouterMetrics, read_placement, read_pools, read_room, read_untaken
from router.placement.by_objectives import ByObjectives
from router.placement.cache_index import CacheIndex
from router.placement.departures import Departures
from router.placement.fair_queue import FairQueue
from router.placement.guarded import Guarded
from router.placement.least_loaded import LeastLoaded
from router.placement.output_lengths import OutputLengths
from router.placement.policy import Policy
from router.placement.waiting_room import WaitingRoom
from router.request.services import Services, Spawn
from router.telemetry import Telemetry
from router.tenant_metrics import TenantMetrics
from router.untaken import Untaken
from router.ways_in import (
    GRPC_SERVICES,
    WaysIn,
    add_grpc,
    gate_of,
    is_cluster_told,
    open_http,
    public_edge,
)

logger = logging.getLogger(__name__)

_LAST_WORD_S = 1.0  # for clients to take why they were cut off


async def serve(config: RouterConfig, stop: asyncio.Event, ready: Ready) -> None:
    """Serve until ``stop`` is set, then drain for ``timers.drain_s`` at most.

    Raises ConfigurationError.
    """
    discovery = choose(config, time.monotonic)
    callers = callers_of(config.api_keys, config.jwt)
    gate = gate_of(callers, lambda reason, metadata: ways.generator.refused(reason, metadata))
    edge = public_edge(config, gate)
    model = await _model_unless_stopped(config, stop)
    if model is None:
        return
    incarnation = secrets.token_hex(8)
    async with (
        ServiceHost(
            config, instance_id=incarnation, public=edge, sampled=_sampling(config)
        ) as host,
        asyncio.TaskGroup() as tasks,
    ):
        background = _Background(tasks)
        metrics = RouterMetrics(
            host.metrics, TenantMetrics(host.operator_metrics, config.max_tenant_series)
        )
        services = _make_services(config, model, host, metrics, incarnation, background.spawn)
        read_room(host.metrics, services.room)
        read_pools(host.metrics, services.cluster, discovery)
        read_placement(host.metrics, services.policy)
        ways = _make_ways_in(model, services, callers, metrics, host)
        add_grpc(ways, host, config)
        http = None
        if config.http:
            http = open_http(ways, host, config, edge.certificate, lambda: not stop.is_set())
        # Not guarded: a router that lost sight of its workers must not look healthy.
        watching = tasks.create_task(services.cluster.run(discovery), name="cluster")
        knowing = tasks.create_task(callers.run(), name="callers")
        viewing = tasks.create_task(ways.view.run(), name="cluster-view")
        beating = tasks.create_task(_beat(config), name="heartbeat")
        if http is not None:
            tasks.create_task(http.serve(), name="http")
        settle()
        await host.start(GRPC_SERVICES, {} if http is None else {"http": http.port})
        ready(host.port)
        telling = tasks.create_task(_tell_ready(host, services.cluster), name="readiness")
        await stop.wait()
        telling.cancel()
        host.set_serving(False)
        await _see_off(ways.admission, config.timers, asyncio.get_running_loop().time)
        await drain(host, http, ways.admission, config.timers)
        background.stop()
        knowing.cancel()
        viewing.cancel()
        beating.cancel()
        await ways.admission.close()
        await services.cluster.finish_traces()
        watching.cancel()


def _make_services(
    config: RouterConfig,
    model: ServedModel,
    host: ServiceHost,
    metrics: RouterMetrics,
    incarnation: str,
    spawn: Spawn,
) -> Services:
    """Placement, those who wait for it, and the workers: each knows the next by what it asks."""
    loop = asyncio.get_running_loop()
    policy = _make_policy(config, incarnation)
    room = WaitingRoom(
        max_waiting=config.max_queue,
        max_placed=config.max_concurrent,
        schedule=loop.call_soon,
        schedule_rest=loop.call_later,
        has_room=lambda those: cluster.snapshot().has_room_for(those),
        departures=Departures(loop.time, random.random),
        queue=FairQueue(config.classes.weight_of),
        clock=loop.time,
        used=metrics.engine_used,
    )
    cluster = Cluster(
        config,
        policy,
        incarnation=incarnation,
        text_digest=model.tokenizer.digest,
        on_change=room.pump_soon,
        now_s=host.tracing.now_s,
    )
    return Services(
        config=config,
        cluster=cluster,
        policy=policy,
        room=room,
        lengths=OutputLengths(),
        incarnation=incarnation,
        sequence_ids=itertools.count(1),
        spawn=spawn,
    )


def _make_ways_in(
    model: ServedModel,
    services: Services,
    callers: Callers,
    metrics: RouterMetrics,
    host: ServiceHost,
) -> WaysIn:
    config, cluster = services.config, services.cluster
    telemetry = Telemetry(metrics, host.tracing, cluster, model.name, config.trace_slow_s)
    admission = Admission(model, cluster, config)
    quotas = Quotas(
        config.quota.limits,
        asyncio.get_running_loop().time,
        metrics.quota_refused,
        random.random,
    )
    untaken = Untaken(asyncio.get_running_loop().time, config.max_untaken_bytes, metrics.cut_off)
    handed = HandedOver(config.max_untaken_bytes)
    read_untaken(host.metrics, untaken, handed)
    view = ClusterView(
        model.name,
        cluster.overview,
        services.room,
        time.monotonic,
        ttft=metrics.requests.ttft_seconds,
        itl=metrics.requests.itl_seconds,
        is_told=is_cluster_told(config, callers),
    )
    return WaysIn(
        admission,
        Generator(admission, quotas, services, telemetry, untaken),
        PromptAnswers(admission, quotas, services, telemetry),
        callers,
        view,
        untaken,
        handed,
    )


def _sampling(config: RouterConfig) -> Sampling:
    return Sampling(
        config.trace_sample_ratio,
        config.trace_caller_per_s,
        holds=config.trace_slow_s is not None,
    )


async def _beat(config: RouterConfig) -> None:
    if config.beats_to is not None:
        await beat(config.beats_to, config.timers.heartbeat_s)


async def _tell_ready(host: ServiceHost, cluster: Cluster) -> None:
    """Say SERVING once a worker was seen.

    And go on saying so if all are lost: a client learns more from NO_WORKER than from
    a balancer without routers.
    """
    await cluster.wait_found()
    host.set_serving(True)
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
    guarded = Guarded if config.placement == "predicted" else ByObjectives
    return guarded(plain, random.random)


async def _model_unless_stopped(config: RouterConfig, stop: asyncio.Event) -> ServedModel | None:
    """What is served; None: ``stop`` was set before it was there."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="model")
    try:
        return await unless_stopped(
            partial(_load_model, config),
            stop,
            thread=thread,
            name="loading the model",
        )
    finally:
        thread.shutdown(wait=False)


def _load_model(config: RouterConfig, abandoned: threading.Event) -> ServedModel:
    cache_dir = config.cache_dir or model_source.DEFAULT_CACHE_DIR
    with ConsoleProgress() as progress:
        report = abandonable(progress, abandoned)
        source = model_source.resolve(config.model, cache_dir, report, texts_only=True)
    name = config.served_model_name or source.name
    return ServedModel.from_folder(
        name, source.folder, config.answer_form, inert_contents=config.has_inert_contents
    )


async def _see_off(admission: Admission, timers: Timers, clock: Callable[[], float]) -> None:
    """Serve clients until they have gone elsewhere; those who stay hear why they have to."""
    if not await until_quiet(lambda: admission.num_arrived, timers, clock):
        logger.info("clients go on asking a router that ends: their requests are refused")
        admission.drain()
        await asyncio.sleep(timers.lame_duck_s)


async def drain(
    host: ServiceHost, http: HttpServer | None, admission: Admission, timers: Timers
) -> None:
    """Send clients elsewhere (GOAWAY) and let what runs finish; then end what is left.

    What comes with the GOAWAY is still taken, for as long as a lame duck's, and for half of the
    time that there is at the most: it needs some to end. Answers on their way to slow clients
    have what is left of the time, and no more than any response has.
    """
    patience_s, clock = timers.drain_s, asyncio.get_running_loop().time
    ends_s = clock() + patience_s + _LAST_WORD_S
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(host.server.stop(patience_s + _LAST_WORD_S), name="goaway")
        if http is not None:
            tasks.create_task(http.stop(patience_s), name="http-drain")
        try:
            async with asyncio.timeout(patience_s):
                await asyncio.sleep(min(timers.lame_duck_s, patience_s / 2))
                admission.drain()
                await admission.wait_idle()
        except TimeoutError:
            logger.warning("requests were cut off", extra={"num_open": admission.num_open})
            admission.cut_off()
        unsent_s = min(timers.client_write_s, ends_s - clock())
        await host.calls.end("the router shuts down", unsent_s)
        await host.server.stop(0)  # who only watches our health, too
    await admission.wait_idle()  # those that were cancelled free what they hold

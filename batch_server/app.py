"""The batch server's process: puts the parts together, serves, stops."""

import asyncio
import logging
import time
from contextlib import suppress

from batch_server.config import BatchServerConfig
from batch_server.desk.batches import BatchDesk
from batch_server.desk.files import FileDesk, UploadBounds
from batch_server.http.batches import MAX_BODY_BYTES, BatchAnswers
from batch_server.http.files import FileAnswers
from batch_server.http.routes import make_app
from batch_server.router_client import RouterFiles, router_client
from batch_server.rpc.servicer import MAX_MESSAGE_BYTES, SERVICE, BatchesServicer
from batch_server.runner.batch_run import Needs
from batch_server.runner.input_file import InputBounds
from batch_server.runner.pace import Pace
from batch_server.runner.runner import Runner
from batch_server.runner.sender import AnswerBounds, LineSender
from batch_server.runner.slots import Slots
from batch_server.store.batches import BatchStore
from batch_server.store.database import Database
from batch_server.store.files import FileStore
from batch_server.store.tenant_room import TenantBounds
from diptych.process import Ready, settle
from diptych.rpc.connections import GRPC_SHARE, most_connections
from diptych.rpc.server import MAX_CALLS_RATIO, Metadata, PublicEdge
from diptych.service_host import ServiceHost
from diptych.telemetry.metrics import Metrics
from router.frontend.callers.callers import Anybody, Callers, authorization
from router.frontend.callers.choice import callers_of
from router.frontend.http.exchange import BodyRoom
from router.frontend.http.own_names import by_own_names
from router.frontend.http.server import HttpServer, bind, bounds_of
from router.untaken import Untaken

logger = logging.getLogger(__name__)

_MAX_ALL_BODY_BYTES = 64 * MAX_BODY_BYTES
_MAX_UNTAKEN_BYTES = 128 * 2**20  # files go out in pieces: few wait, and lists of batches
_MAX_CALLS = 256
_LAST_WORD_S = 1.0  # for clients to take why they were cut off
_MAX_SLOW = 64  # to come, of a mebibyte each
_UNBOUNDED_S = 2_000_000.0  # gRPC counts ms: there is no other server that a client could go to


async def serve(config: BatchServerConfig, stop: asyncio.Event, ready: Ready) -> None:
    """Serve until ``stop`` is set. Lines that are with routers then are sent again later.

    Raises ConfigurationError.
    """
    callers = callers_of(config.api_keys, config.jwt)
    edge = public_edge(config, callers)
    asking_by = RouterFiles(config)
    async with (
        ServiceHost(config, public=edge) as host,
        Database(config.database) as database,
        router_client(asking_by, max_connections=config.max_concurrent) as client,
        asyncio.TaskGroup() as tasks,
    ):
        files, batches = FileStore(database), BatchStore(database)
        undropped = await files.drop_unfinished()
        slots = Slots(Pace(config.max_concurrent), time.monotonic)
        answers = AnswerBounds(config.max_answer_bytes, config.line_timeout_s)
        needs = Needs(
            batches=batches,
            chunks=files,
            sender=LineSender(client, config.router, slots, config.max_attempts, answers),
            bounds=InputBounds(config.max_lines, config.max_line_bytes),
            max_concurrent=config.max_concurrent,
            clock=time.time,
        )
        runner = Runner(needs)
        measure(host.metrics, runner, slots)
        tenants = TenantBounds(config.max_open_batches, config.max_tenant_bytes)
        uploads = UploadBounds(config.max_file_bytes, config.max_tenant_bytes, config.upload_s)
        file_desk = FileDesk(files, uploads, time.time, undropped)
        batch_desk = BatchDesk(batches, files, runner, tenants, time.time)
        BatchesServicer(
            file_desk, batch_desk, callers, write_s=config.timers.client_write_s
        ).add_to(host.server)
        app = make_app(
            FileAnswers(file_desk, config.max_file_bytes, config.timers.client_write_s),
            BatchAnswers(batch_desk),
            callers,
            BodyRoom(MAX_BODY_BYTES, _MAX_ALL_BODY_BYTES, config.timers.client_write_s),
        )
        http = HttpServer(
            by_own_names(app, host.host, callers),
            bind(host.host, config.http_port, config.timers),
            bounds_of(config.max_file_bytes, config.upload_s),
            Untaken(asyncio.get_running_loop().time, _MAX_UNTAKEN_BYTES),
            edge.certificate,
        )
        logger.info("HTTP API", extra={"address": host.reachable(http.port)})
        running = tasks.create_task(runner.run(), name="runner")
        knowing = tasks.create_task(callers.run(), name="callers")
        following = tasks.create_task(asking_by.run(), name="router-files")
        keeping = tasks.create_task(database.keep(), name="database")
        tasks.create_task(http.serve(), name="http")
        settle()
        await host.start([SERVICE], {"http": http.port})
        host.set_serving(True)
        ready(host.port)
        await stop.wait()
        host.set_serving(False)
        running.cancel()
        batch_desk.end()
        async with asyncio.TaskGroup() as ending:
            ending.create_task(http.stop(config.timers.drain_s), name="http-drain")
            ending.create_task(_end_calls(host, config.timers.drain_s), name="grpc-drain")
        with suppress(TimeoutError):  # of a database that does not answer
            async with asyncio.timeout(config.timers.drain_s):
                await file_desk.wait_idle()  # what was cut off leaves nothing
        knowing.cancel()
        following.cancel()
        keeping.cancel()


async def _end_calls(host: ServiceHost, patience_s: float) -> None:
    """Take no more, and let those that are open end; what outlasts that hears why."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(host.server.stop(patience_s + _LAST_WORD_S), name="goaway")
        await host.calls.wait_over(patience_s)
        await host.calls.end("the server shuts down", _LAST_WORD_S)
        await host.server.stop(0)  # who only watches our health, too


def public_edge(config: BatchServerConfig, callers: Callers) -> PublicEdge:
    """What clients may do to the gRPC server, which lets nobody in who is not known.

    Raises ConfigurationError.
    """

    async def gate(method: str, metadata: Metadata) -> str:
        return (await callers.tenant(authorization(metadata))).name

    return PublicEdge(
        max_connections=most_connections(GRPC_SHARE),
        max_served=_MAX_CALLS,
        max_concurrent_rpcs=MAX_CALLS_RATIO * _MAX_CALLS,
        max_concurrent_streams=_MAX_CALLS // 2,
        max_receive_bytes=MAX_MESSAGE_BYTES,
        max_slow=_MAX_SLOW,
        max_connection_age_s=_UNBOUNDED_S,
        max_connection_grace_s=_UNBOUNDED_S,
        body_patience_s=config.timers.client_write_s,
        certificate=config.public_tls.read(),
        gate=None if isinstance(callers, Anybody) else gate,
    )


def measure(metrics: Metrics, runner: Runner, slots: Slots) -> None:
    """Tell Prometheus how these are, whenever it asks."""
    metrics.read_gauge("batches_open", "Batches that have not ended.", lambda: runner.num_open)
    metrics.read_gauge("batch_lines_sent", "Lines that are with routers.", lambda: slots.num_taken)
    metrics.read_gauge(
        "batch_lines_limit",
        "Lines that may be with routers: fewer after these had no room.",
        lambda: slots.pace.limit,
    )

"""The life of a worker process: load, serve, drain. The same whichever roles it has.

gRPC answers from the first moment (health NOT_SERVING, Watch STARTING) while the
model thread loads. Shutdown is a protocol: not serving, refuse new work, let
what runs finish, end what is left, free everything.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Protocol

from diptych.errors import DeviceLostError, DiptychError, NoWorkerError, WorkerDrainingError
from diptych.process import UnfinishedStartError, settle
from diptych.progress import abandonable
from diptych.service_host import ServiceHost
from diptych.start_up import entered_unless_stopped, unless_stopped
from diptych.v1 import worker_pb2
from diptych.worker.audit import BlockAudit
from diptych.worker.config import WorkerConfig
from diptych.worker.engine_parts import EngineParts
from diptych.worker.engine_watch import EngineStuckError, EngineWatch
from diptych.worker.loading import LoadedModel, load_model
from diptych.worker.rank_team import RankTeam
from diptych.worker.status import WorkerStatus
from diptych.worker.step_metrics import StepMetrics
from diptych.worker.transfer_watch import TransferStuckError, TransferWatch

logger = logging.getLogger(__name__)

_POLL_S = 0.02
_END_S = 2.0  # streams that were ended have freed everything by then
_STOP_GRACE_S = 0.25
_LAST_WORDS_S = 2.0  # routers say which of the spans that are held are to be sent
_TELL_FAILED_S = 0.2  # Watch tells why before the process goes


class EngineDiedError(Exception):
    """The engine's loop ended with an error; the process must go down."""


class Serving(Protocol):
    """What a worker serves, once its engine is there. Everything on the event loop."""

    @property
    def digest_level(self) -> str: ...

    @property
    def num_scratch_blocks(self) -> int:
        """KV blocks beyond the pool's that the transfer needs."""
        ...

    def attached(
        self, parts: EngineParts, metrics: StepMetrics
    ) -> AbstractAsyncContextManager[None]:
        """Everything that needs the engine; inside the context there can be served."""

    def ready_services(self) -> frozenset[str]:
        """Full names of the services whose requests may come, given that the engine is loaded.

        Empty: the worker is not ready.
        """
        ...

    def transfer_stuck_s(self) -> float:
        """For how long the thread that moves KV blocks has been at one thing, s."""
        ...

    def unfinished_block_ids(self) -> Collection[int]:
        """Local blocks that reads without a pull may still write."""

    def num_active(self) -> int:
        """What has to finish before a drain is done."""

    def end_all(self, error: DiptychError) -> None:
        """End every stream, soon."""

    def num_streams(self) -> int:
        """Streams whose handler has not returned."""


class WorkerLife:
    """Runs one worker from an open server to an empty pool."""

    def __init__(
        self, config: WorkerConfig, host: ServiceHost, status: WorkerStatus, serving: Serving
    ) -> None:
        self._config = config
        self._host = host
        self._status = status
        self._serving = serving
        self._told: frozenset[str] = frozenset()  # services that take requests, by health

    async def run(self, stop: asyncio.Event) -> None:
        """Load, serve until ``stop`` is set, drain. The host has started already.

        Raises ConfigurationError from loading, EngineDiedError, TransferStuckError,
        DeviceLostError, StuckThreadError.
        """
        model_thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        try:
            model = await self._load(model_thread, stop)
            if model is not None:
                try:
                    await self._serve(model, model_thread, stop)
                finally:
                    if model.team is not None:
                        model.team.close()
        finally:
            model_thread.shutdown(wait=False)  # idle by now, unless it is stuck

    async def _serve(
        self, model: LoadedModel, model_thread: ThreadPoolExecutor, stop: asyncio.Event
    ) -> None:
        parts = EngineParts.build(self._config, model, model_thread)
        metrics = StepMetrics(self._host.metrics, parts)
        parts.engine.subscribe(lambda updates: self._stepped(metrics))
        async with asyncio.TaskGroup() as tasks:
            engine = tasks.create_task(self._run_engine(parts), name="engine")
            watches = [tasks.create_task(self._watch_engine(parts), name="engine-watch")]
            if model.team is not None:
                watches.append(tasks.create_task(self._watch_ranks(model.team), name="rank-watch"))
            try:
                async with AsyncExitStack() as serving:
                    if await entered_unless_stopped(
                        self._serving.attached(parts, metrics),
                        stop,
                        stack=serving,
                        tasks=tasks,
                        name="opening transports",
                    ):
                        await self._serve_until(stop, parts, tasks)
            finally:
                await self._end_engine(engine, parts)
            for watch in watches:
                watch.cancel()

    async def _serve_until(
        self, stop: asyncio.Event, parts: EngineParts, tasks: asyncio.TaskGroup
    ) -> None:
        """All is attached: tell so, and drain once ``stop`` is set."""
        try:
            settle()
            self._status.cache_log = parts.engine.cache_log
            self._status.loaded = True
            watching = self._watch(parts, tasks)
            await stop.wait()
            for task in watching:
                task.cancel()
            await self._drain()
        finally:
            await self._host.server.stop(_STOP_GRACE_S)

    async def _end_engine(self, engine: asyncio.Task[None], parts: EngineParts) -> None:
        """Let the engine end its last step, however serving ended. Raises EngineStuckError.

        Whatever failed may have taken the other watch over that step with it.
        """
        if not engine.cancelling():  # a second time would not wait for the step
            engine.cancel()
        watch = EngineWatch(parts.progress, self._config.timers)
        while not engine.done():
            await asyncio.wait([engine], timeout=watch.turn_s)
            try:
                watch.check()
            except EngineStuckError:
                parts.engine.abandon()
                raise

    def _watch(
        self, parts: EngineParts, tasks: asyncio.TaskGroup
    ) -> Collection[asyncio.Task[None]]:
        """Start what looks after the worker while it serves."""
        audit = BlockAudit(
            parts.engine, self._status, self._host.metrics, self._serving.unfinished_block_ids
        )
        watch = TransferWatch(
            self._serving.transfer_stuck_s, parts.memory, self._config.timers, self._status
        )
        return (
            tasks.create_task(self._tell_ready(watch), name="readiness"),
            tasks.create_task(audit.run(), name="audit"),
            tasks.create_task(self._watch_transfer(watch), name="transfer-watch"),
        )

    async def _load(
        self, model_thread: ThreadPoolExecutor, stop: asyncio.Event
    ) -> LoadedModel | None:
        """The model, or None if ``stop`` was set before it was there."""
        loop = asyncio.get_running_loop()
        shown = -1.0

        def progress(stage: str, done_ratio: float) -> None:
            nonlocal shown
            if abs(done_ratio - shown) >= 0.01 or done_ratio in (0.0, 1.0):
                shown = done_ratio
                message = f"{stage}: {done_ratio:.0%}"
                loop.call_soon_threadsafe(
                    self._status.set, worker_pb2.SERVING_STATE_STARTING, message
                )

        def load(abandoned: threading.Event) -> LoadedModel:
            serving, report = self._serving, abandonable(progress, abandoned)
            level, num_scratch = serving.digest_level, serving.num_scratch_blocks
            return load_model(self._config, level, num_scratch, report)

        try:
            return await unless_stopped(
                load,
                stop,
                thread=model_thread,
                name="loading the model",
            )
        except UnfinishedStartError:
            raise
        except Exception as error:
            reason = error.message if isinstance(error, DiptychError) else type(error).__name__
            self._status.set(worker_pb2.SERVING_STATE_FAILED, reason)
            raise

    def _stepped(self, metrics: StepMetrics) -> None:
        metrics.book()
        self._status.load_changed()

    async def _run_engine(self, parts: EngineParts) -> None:
        try:
            await parts.engine.run()
        except Exception as error:
            logger.critical("the engine died", exc_info=error)
            await self._tell_failed("the engine died")
            raise EngineDiedError(f"the engine died: {error!r}") from error

    async def _watch_engine(self, parts: EngineParts) -> None:
        try:
            await EngineWatch(parts.progress, self._config.timers).run()
        except EngineStuckError as error:
            logger.critical("the model thread is stuck", extra={"reason": str(error)})
            await self._tell_failed(str(error))
            self._serving.end_all(NoWorkerError(f"the worker failed: {error}"))
            await self._wait_zero(self._serving.num_streams, _END_S)
            parts.engine.abandon()
            raise

    async def _watch_ranks(self, team: RankTeam) -> None:
        while True:
            lost = team.lost()
            if lost is not None:
                logger.critical("a rank is lost", extra={"reason": lost})
                await self._tell_failed(lost)
                raise DeviceLostError(lost)
            await asyncio.sleep(self._config.timers.heartbeat_s / 2)

    async def _watch_transfer(self, watch: TransferWatch) -> None:
        try:
            await watch.run()
        except (TransferStuckError, DeviceLostError):
            await self._tell_failed(watch.problem)
            raise

    async def _tell_failed(self, why: str) -> None:
        self._status.set(worker_pb2.SERVING_STATE_FAILED, why)
        self._host.set_failed()
        await asyncio.sleep(_TELL_FAILED_S)

    async def _tell_ready(self, watch: TransferWatch) -> None:
        """Keep health and Watch at what is ready by ``serving`` and ``watch``."""
        with self._status.watching_urgently() as changed:
            while True:
                changed.clear()
                if self._status.state == worker_pb2.SERVING_STATE_FAILED:
                    self._host.set_failed()
                elif watch.problem or not (ready := self._serving.ready_services()):
                    why = watch.problem or "no proven pair"
                    self._status.set(worker_pb2.SERVING_STATE_STARTING, why)
                    self._set_serving(frozenset())
                else:
                    self._status.set(worker_pb2.SERVING_STATE_READY)
                    self._set_serving(ready)
                await changed.wait()

    def _set_serving(self, services: frozenset[str]) -> None:
        if services != self._told:
            self._told = services
            self._host.set_serving_only(services)

    async def _drain(self) -> None:
        self._status.set(worker_pb2.SERVING_STATE_DRAINING, "shutting down")
        self._set_serving(frozenset())
        if not await self._wait_zero(self._serving.num_active, self._config.timers.drain_s):
            logger.warning("drain timed out", extra={"num_active": self._serving.num_active()})
        self._serving.end_all(WorkerDrainingError("the worker shuts down"))
        if not await self._wait_zero(self._serving.num_streams, _END_S):
            logger.warning("streams do not end", extra={"num_streams": self._serving.num_streams()})
        await self._wait_zero(lambda: self._host.tracing.num_held, _LAST_WORDS_S)

    async def _wait_zero(self, count: Callable[[], int], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while count():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_POLL_S)
        return True

"""What every role serves beside its own services: health, reflection, metrics, traces."""

import asyncio
import gc
import json
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
import prometheus_client
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import RestrictedRegistry

from diptych import __version__, settings
from diptych.address import LAST_PORT, is_host, port_of
from diptych.errors import ConfigurationError
from diptych.process import ProcessConfig
from diptych.rpc.connections import PROBES_SHARE, most_connections
from diptych.rpc.health import Health
from diptych.rpc.identity import Identity
from diptych.rpc.open_calls import OpenCalls
from diptych.rpc.server import PublicEdge, make_server
from diptych.telemetry import logs
from diptych.telemetry.metrics import Metrics
from diptych.telemetry.metrics_server import MetricsServer
from diptych.telemetry.sampling import Sampling
from diptych.telemetry.standard_tracing import StandardTracing, read_standard
from diptych.telemetry.tracing import Tracing

logger = logging.getLogger(__name__)

_LAG_PERIOD_S = 0.1
_LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_SCRAPE_TIMEOUT_S = 5.0
_STOP_GRACE_S = 0.5
_MAX_PROBES = 64  # at a time, on the port that is theirs
_MAX_PROBES_OF_ONE = 4  # over one connection, for a probe asks once
_PROBE_PATIENCE_S = 5.0  # for what it asks
_PROBE_AGE_S = 60.0  # of a connection there, which costs a probe nothing to open anew
_PROBE_GRACE_S = 5.0
_NO_OTHERS: Mapping[str, int] = {}


def standard_tracing(endpoint: str | None = None) -> StandardTracing:
    """What OpenTelemetry's own variables decide; ``endpoint`` is our setting.

    Raises ConfigurationError: they ask for what is not served.
    """
    return read_standard(settings.environment("OTEL_"), endpoint)


class ServiceHost:
    """One process object's gRPC server, metrics endpoint and tracer. An async context manager.

    Owns ``server`` (add servicers before ``start``) and its open ``calls``,
    ``metrics``/``registry``, ``operator_metrics``, which the endpoint alone tells beside these
    and nothing that clients reach, and ``tracing``. Leaving the context stops the server (calls
    still open are cancelled after half a second), the endpoint, flushes spans for two
    seconds at most, and undoes ``process.settle``. Several may live in one
    process. Used from the event-loop thread only; a scrape is collected on
    it, so metrics may read live state.
    """

    def __init__(
        self,
        config: ProcessConfig,
        *,
        instance_id: str = "",
        public: PublicEdge | None = None,
        identity: Identity | None = None,
        sampled: Sampling | None = None,
    ) -> None:
        """``instance_id`` is the process's incarnation, for the trace's resource.

        ``sampled`` where it is this process that decides what is traced.

        ``public`` where clients connect, and not only processes of the cluster; ``identity``
        where those, and nobody else, prove who they are.
        """
        self._config = config
        self.identity = identity
        self._certificate = identity if public is None else public.certificate
        self.host = host_of(config.listen)
        self._listen_host = config.listen.rpartition(":")[0]
        self.registry = _LoopRegistry()
        self.metrics = Metrics(self.registry)
        self._operators = _LoopRegistry(self.registry)
        self.operator_metrics = Metrics(self._operators)
        self.tracing = Tracing(
            f"diptych-{config.role}",
            endpoint=config.otlp_endpoint,
            sampled=sampled or Sampling(config.trace_sample_ratio),
            standard=standard_tracing(config.otlp_endpoint),
            instance_id=instance_id,
        )
        self.calls = OpenCalls()
        self.server = make_server(config.timers, public, identity, self.calls)
        self.port = 0
        self.metrics_port: int | None = None
        self._health = Health()
        self._services: list[str] = []
        self._stack = AsyncExitStack()
        self._lag_timer: asyncio.TimerHandle | None = None
        self._lag = self.metrics.histogram(
            "event_loop_lag_seconds",
            "How much later than due the event loop ran a timer, sampled every 100 ms, s.",
            _LAG_BUCKETS,
        )

    @property
    def address(self) -> str:
        """host:port of the gRPC server, as a process on this machine reaches it."""
        return f"{_reachable(self.host)}:{self.port}"

    @property
    def metrics_address(self) -> str | None:
        """host:port of the Prometheus endpoint; None when it is off."""
        if self.metrics_port is None:
            return None
        return f"{_reachable(self.host)}:{self.metrics_port}"

    def reachable(self, port: int) -> str:
        """host:port of another server of this process on the same host."""
        return f"{_reachable(self.host)}:{port}"

    async def start(
        self, services: Iterable[str], other_ports: Mapping[str, int] = _NO_OTHERS
    ) -> None:
        """Accept connections; ``services`` are NOT_SERVING until ``set_serving(True)``.

        They are the full names of the role's own services, for reflection and
        health. Writes the port file last; ``other_ports`` names what else this
        process serves on the same host, for that file (``http``: ``http_address``).

        Raises:
            ConfigurationError: an address cannot be bound.
        """
        self._services = list(services)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        own = [health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection([*self._services, *own], self.server)
        self._set_health([""], serving=True)
        self.set_serving(False)
        try:
            self.port = self._add_port(self._config.listen)
        except RuntimeError:
            self.port = 0
        if self.port == 0:
            raise ConfigurationError(
                f"--listen: cannot bind {self._config.listen}: in use, or not an address of "
                "this machine"
            )
        await self.server.start()
        if self._config.metrics_port is not None:
            self._start_metrics(self._config.metrics_port)
        if self._config.health_port is not None:
            other_ports = {**other_ports, "health": await self._start_health()}
        self._write_port_file(other_ports)

    async def _start_health(self) -> int:
        """Answer how health is, and nothing else, to anybody; the port.

        It is not watched there: streams would hold the places of those who ask.
        """
        edge = PublicEdge(
            max_connections=most_connections(PROBES_SHARE),
            max_served=_MAX_PROBES,
            max_concurrent_rpcs=_MAX_PROBES,
            max_concurrent_streams=_MAX_PROBES_OF_ONE,
            max_receive_bytes=1024,
            max_slow=2 * _MAX_PROBES,  # all of them, for they are small
            max_connection_age_s=_PROBE_AGE_S,
            max_connection_grace_s=_PROBE_GRACE_S,
            body_patience_s=_PROBE_PATIENCE_S,
        )
        server = make_server(public=edge)
        check = grpc.unary_unary_rpc_method_handler(
            self._health.Check,
            request_deserializer=health_pb2.HealthCheckRequest.FromString,
            response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
        )
        services = [grpc.method_handlers_generic_handler(health.SERVICE_NAME, {"Check": check})]
        server.add_generic_rpc_handlers(services)
        address = f"{self._listen_host}:{self._config.health_port}"
        try:
            port = server.add_insecure_port(address)
        except RuntimeError:
            port = 0
        if port == 0:
            raise ConfigurationError(f"--health-port: cannot bind {address}")
        await server.start()
        self._stack.push_async_callback(server.stop, None)
        return port

    def _add_port(self, address: str) -> int:
        if self._certificate is None:
            return self.server.add_insecure_port(address)
        return self.server.add_secure_port(address, self._certificate.of_server())

    def set_serving(self, serving: bool) -> None:
        """Tell health checkers whether the role's services take requests: readiness.

        The process as a whole (service ``""``, liveness) is not meant: one that loads or
        drains must not be killed for it.
        """
        self._set_health(self._services, serving)

    def set_serving_only(self, services: Collection[str]) -> None:
        """Tell them that these of the role's services take requests, and that the others do not."""
        for serving in (False, True):
            names = [name for name in self._services if (name in services) is serving]
            self._set_health(names, serving)

    def set_failed(self) -> None:
        """Tell health checkers that the process will not serve again: end it."""
        self._set_health(["", *self._services], serving=False)

    def _set_health(self, services: Iterable[str], serving: bool) -> None:
        statuses = health_pb2.HealthCheckResponse
        for service in services:
            status = statuses.SERVING if serving else statuses.NOT_SERVING
            self._health.set(service, status)

    async def __aenter__(self) -> Self:
        prometheus_client.ProcessCollector(registry=self.registry)
        info = self.metrics.gauges("build_info", "Always 1.", ("version", "role"))
        info.labels(__version__, self._config.role).set(1)
        self.metrics.read_gauge("asyncio_tasks", "Unfinished asyncio tasks.", _num_tasks)
        self.metrics.read_gauge(
            "log_lines_dropped",
            "Log lines of this process that were dropped, as standard error took none.",
            logs.num_dropped_lines,
        )
        self.metrics.read_gauge(
            "trace_spans_held",
            "Spans that wait for the router's word on whether their trace is sent.",
            lambda: self.tracing.num_held,
        )
        self.metrics.read_gauge(
            "trace_spans_forgotten",
            "Held spans of this process that were dropped without a word on their trace.",
            lambda: self.tracing.num_forgotten,
        )
        if self.tracing.enabled:  # so that who looks sees whether anything is traced at all
            self.metrics.read_gauge(
                "trace_spans_sent",
                "Spans of this process that the collector took; absent where nothing is traced.",
                lambda: self.tracing.num_sent,
            )
            self.metrics.read_gauge(
                "trace_spans_unsent",
                "Spans of this process that were to be sent, and that the collector did not take; "
                "absent where nothing is traced.",
                lambda: self.tracing.num_unsent,
            )
        self.registry.loop = self._operators.loop = asyncio.get_running_loop()
        self._stack.callback(gc.unfreeze)  # what was settled may go, if the process goes on
        self._stack.push_async_callback(asyncio.to_thread, self.tracing.shutdown)
        self._schedule_lag()
        self._stack.callback(self._stop_lag)
        self._stack.push_async_callback(self.server.stop, _STOP_GRACE_S)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return await self._stack.__aexit__(kind, error, trace)

    def _schedule_lag(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + _LAG_PERIOD_S
        self._lag_timer = loop.call_at(due, self._measure_lag, due)

    def _measure_lag(self, due: float) -> None:
        self._lag.observe(max(0.0, asyncio.get_running_loop().time() - due))
        self._schedule_lag()

    def _stop_lag(self) -> None:
        if self._lag_timer is not None:
            self._lag_timer.cancel()

    def _start_metrics(self, port: int) -> None:
        try:
            server = MetricsServer(self.host, port, self._operators)
        except OSError as error:
            raise ConfigurationError(
                f"--metrics-port: cannot bind {self.host}:{port}: {error.strerror}"
            ) from None
        self.metrics_port = server.port
        self._stack.push_async_callback(asyncio.to_thread, server.close)

    def _write_port_file(self, other_ports: Mapping[str, int]) -> None:
        path = self._config.port_file
        if path is None:
            return
        ports = {"address": self.address, "metrics_address": self.metrics_address or ""}
        for name, port in other_ports.items():
            ports[f"{name}_address"] = self.reachable(port)
        write_port_file(path, ports)


def write_port_file(path: Path, ports: Mapping[str, object]) -> None:
    """Tell where a process listens; who reads it finds nothing or all of it.

    Raises ConfigurationError.
    """
    partial = path.parent / f"{path.name}.{os.getpid()}.partial"
    try:
        if path.is_dir():
            raise ConfigurationError(f"--port-file: {path}: is a folder: name a file in it")
        partial.write_text(json.dumps(ports))
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        reason = f"{error.strerror}: name a file that can be written"
        raise ConfigurationError(f"--port-file: {path}: {reason}") from None


class _LoopRegistry(CollectorRegistry):
    """Collects on the event loop's thread, whichever thread asks: others' metrics, and its own."""

    def __init__(self, *others: CollectorRegistry) -> None:
        super().__init__(auto_describe=True)
        self.loop: asyncio.AbstractEventLoop | None = None
        self._others = others

    def collect(self) -> Iterator[Metric]:
        on_loop = _running_loop() is self.loop
        if self.loop is None or on_loop:
            return iter(self._collected())
        collected: Future[list[Metric]] = Future()
        self.loop.call_soon_threadsafe(self._collect, collected)  # a task would take three turns
        return iter(collected.result(_SCRAPE_TIMEOUT_S))

    def _collect(self, collected: "Future[list[Metric]]") -> None:
        try:
            collected.set_result(self._collected())
        except Exception as error:  # noqa: BLE001 - who asked has to hear it
            collected.set_exception(error)

    def _collected(self) -> list[Metric]:
        found = [metric for other in self._others for metric in other.collect()]
        return [*found, *super().collect()]

    def restricted_registry(self, names: Iterable[str]) -> RestrictedRegistry:
        """What ``/metrics?name[]=`` asks for; the library's own would go past ``collect``."""
        return _Restricted(names, self)


class _Restricted(RestrictedRegistry):
    """Some samples of a registry, collected as all of them are."""

    def __init__(self, names: Iterable[str], registry: CollectorRegistry) -> None:
        super().__init__(names, registry)
        self._names, self._all = frozenset(names), registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._all.collect():
            found = [sample for sample in metric.samples if sample.name in self._names]
            if found:
                some = Metric(metric.name, metric.documentation, metric.type, metric.unit)
                some.samples = found
                yield some


def _num_tasks() -> float:
    return float(len(asyncio.all_tasks() - {asyncio.current_task()}))  # less the scrape's own


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def host_of(address: str) -> str:
    """Of the setting ``listen``. Raises ConfigurationError: it is not host:port."""
    host, _, _ = address.rpartition(":")
    port = port_of(address)
    if not host or port is None or port > LAST_PORT or not is_host(host):
        raise ConfigurationError(f"--listen: expected host:port (got {address!r})")
    return host.removeprefix("[").removesuffix("]")


def _reachable(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host

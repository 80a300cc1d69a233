"""What a router counts, and what of it is read at each scrape."""

from collections.abc import Iterable
from typing import Protocol

from diptych.errors import all_reasons
from diptych.request_class import RequestClass
from diptych.telemetry.families import RequestMetrics
from diptych.telemetry.metrics import Metrics
from diptych.tenant import Limits
from router.cluster.worker_clock import ClockOffset
from router.discovery.source import Discovery
from router.generation.answer import KVPath
from router.placement.guarded import Guarded
from router.placement.placement import Why
from router.placement.policy import Policy
from router.tenant_metrics import TenantMetrics
from router.untaken import Cut

_RATIO_BUCKETS = (0.25, 0.5, 0.7, 0.8, 0.88, 0.94, 1.0, 1.06, 1.12, 1.2, 1.3, 1.5, 2.0, 4.0)

OUTCOMES = ("ok", "cancelled", *all_reasons())


class Room(Protocol):
    """The requests of this router, at this moment."""

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_placed(self) -> int: ...

    def num_waiting_of(self, request_class: RequestClass) -> int: ...


class Waiting(Protocol):
    """What waits for clients, at this moment."""

    @property
    def num_bytes(self) -> int: ...


class Pools(Protocol):
    """The workers of this router, at this moment; see :class:`router.cluster.members.Cluster`."""

    @property
    def num_proven_pairs(self) -> int: ...

    @property
    def num_ready(self) -> tuple[int, int]: ...

    def clock_offsets(self) -> Iterable[tuple[str, ClockOffset]]: ...


class RouterMetrics:
    """What the requests of one router are counted by. Event loop only."""

    def __init__(self, metrics: Metrics, tenants: TenantMetrics) -> None:
        self.tenants = tenants
        kv_paths = [path.name.lower() for path in KVPath]
        self.requests = RequestMetrics(metrics, OUTCOMES, kv_paths)
        self.unproven = metrics.counter(
            "kv_unproven_total",
            "Hand-offs whose landed KV was not what was announced. Each is an alarm.",
        )
        self.local = metrics.counters(
            "router_local_prefills_total",
            "Times a decode worker was told to compute a prompt itself, by why: choice (few tokens "
            "were missing there, or there is no prefill pool), no_prefill (none was alive), "
            "recompute (a hand-off failed).",
            "why",
            [why.value for why in Why],
        )
        self._quotas = metrics.counters(
            "router_quota_refusals_total",
            "Requests that were refused because their tenant's quota was used up, by which: see "
            "--quota of the router's settings.",
            "quota",
            Limits._fields,
        )
        self.foretold_ratio = metrics.histogram(
            "router_ttft_foretold_ratio",
            "Time from placement to first token, over what placement predicted had foretold.",
            _RATIO_BUCKETS,
        )
        self.foretold_whole_ratio = metrics.histogram(
            "router_ttft_foretold_whole_ratio",
            "Time to first token since the request came, over what was foretold of it when it was "
            "placed: what it had waited by then, and what placement predicted had foretold.",
            _RATIO_BUCKETS,
        )
        self._engine_seconds = metrics.counters(
            "router_class_engine_seconds_total",
            "What requests took of the engines, s, both phases together, by class: what they are "
            "charged by in the queue. Estimated by the tokens and what workers say of their steps.",
            "class",
            RequestClass,
        )
        self._cut_off = metrics.counter(
            "router_clients_cut_off_total",
            "Clients that lost their answers as those of all clients that waited to be taken were "
            "too many bytes, and theirs were taken slowest: see max_untaken_bytes.",
        )
        self.unreachable = metrics.counters(
            "router_unreachable_total",
            "Requests that were refused because they were foretold to miss their objectives, by "
            "class.",
            "class",
            RequestClass,
        )

    def cut_off(self, cut: Cut) -> None:
        """A client was too slow."""
        self._cut_off.inc()

    def engine_used(self, request_class: RequestClass, used_s: float) -> None:
        """A request of that class took so much of the engines, s."""
        self._engine_seconds[request_class].inc(used_s)

    def quota_refused(self, quota: str) -> None:
        """A tenant's quota of that name, see Limits, was used up."""
        self._quotas[quota].inc()


def read_untaken(metrics: Metrics, untaken: Waiting, handed: Waiting) -> None:
    """Gauges of what waits for clients."""
    metrics.read_gauges(
        "router_untaken_bytes",
        "Bytes of answers that wait for clients to take them, by what is done where they are too "
        "many: cut (slow clients are cut off) or refuse (single messages over gRPC: further ones "
        "are refused).",
        ("bound",),
        lambda: [(("cut",), untaken.num_bytes), (("refuse",), handed.num_bytes)],
    )


def read_room(metrics: Metrics, room: Room) -> None:
    """Gauges of how many requests wait, and how many are on workers."""
    metrics.read_gauge(
        "router_requests_waiting",
        "Requests that wait in the router for a placement.",
        lambda: room.num_waiting,
    )
    metrics.read_gauges(
        "router_class_requests_waiting",
        "Of these, by class.",
        ("class",),
        lambda: [((each,), float(room.num_waiting_of(each))) for each in RequestClass],
    )
    metrics.read_gauge(
        "router_requests_placed", "Requests that are on workers.", lambda: room.num_placed
    )


def read_pools(metrics: Metrics, pools: Pools, discovery: Discovery) -> None:
    """Gauges of the workers there are, and of how old the word is that they are."""
    metrics.read_gauge(
        "router_proven_pairs",
        "Pairs of a ready prefill and a ready decode worker proven to move KV.",
        lambda: pools.num_proven_pairs,
    )
    metrics.read_gauges(
        "router_workers_ready",
        "Workers that a request may be placed on, by role.",
        ("role",),
        lambda: [
            ((role,), float(count))
            for role, count in zip(("prefill", "decode"), pools.num_ready, strict=True)
        ],
    )
    metrics.read_gauge(
        "router_discovery_age_seconds",
        "Time since the source of workers last said where they are, s; what it said stays in "
        "use. 0 for a static list.",
        lambda: discovery.age_s,
    )
    metrics.read_gauges(
        "router_worker_clock_offset_seconds",
        "How far the clock of a worker's spans is ahead of the router's, s; negative: behind.",
        ("worker",),
        lambda: [((address,), clock.offset_s) for address, clock in pools.clock_offsets()],
    )
    metrics.read_gauges(
        "router_worker_clock_uncertainty_seconds",
        "How far from that offset the true one may be, s: half a round trip.",
        ("worker",),
        lambda: [((address,), clock.uncertainty_s) for address, clock in pools.clock_offsets()],
    )


def read_placement(metrics: Metrics, policy: Policy) -> None:
    """Gauges of what placement goes by: what is cached where, and its guard if it has one."""
    metrics.read_gauge(
        "router_cached_blocks",
        "KV blocks that workers told to be in their prefix caches, of all workers together.",
        lambda: policy.cache.num_blocks,
    )
    if isinstance(policy, Guarded):
        metrics.read_gauge(
            "router_placement_fixed",
            "1 while requests are placed by load, in a fixed regime, as more objectives are "
            "kept so than by what is foretold; else 0.",
            policy.guard.is_fixed,
        )

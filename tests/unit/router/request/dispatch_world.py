"""A router over two workers that are only described. No sockets."""

from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any
from unittest.mock import create_autospec

import pytest
from opentelemetry.context import Context

from diptych.errors import DiptychError
from diptych.rpc import peer_channel
from diptych.sampling_params import SamplingParams
from diptych.telemetry.stages import Stage
from diptych.v1 import decode_pb2, prefill_pb2, worker_pb2
from router.cluster.decode_link import DecodeLink
from router.cluster.members import Cluster
from router.cluster.watch import WorkerWatch
from router.config import RouterConfig
from router.discovery.source import Targets
from router.placement.cache_index import CacheIndex
from router.placement.claim import NO_CLAIM, Claim
from router.placement.explanation import Explanation
from router.placement.least_loaded import LeastLoaded
from router.placement.output_lengths import OutputLengths
from router.placement.placement import Forecast, Placement, Why
from router.placement.query import Query
from router.placement.views import WorkerId
from router.placement.waiting_room import WaitingRoom
from router.request.actions import Retry
from router.request.dispatch import Dispatch
from router.request.emitted_tokens import RequestShape
from router.request.observer import Waits
from router.request.resolved import ResolvedRequest
from router.request.response_builder import Moments, ResponseBuilder
from router.request.services import Services
from router.request.session import Session
from router.request.terms import Terms
from tests.told_caches import whole

PROMPT = tuple(range(40))
NUM_BLOCKS = 2  # whole ones, of 16 tokens
PREFILL, DECODE = WorkerId("p:1", "p-1"), WorkerId("d:1", "d-1")


class FakeChannel:
    """Never used: no task runs."""

    def stream_stream(self, method: str, **serializers: object) -> None:
        """A stub takes it and calls nothing."""


class Deaf:
    """A listener that nothing is told."""

    def on_prefill_event(self, sequence_id: int, event: prefill_pb2.PrefillEvent) -> None: ...

    def on_lease_ended(self, sequence_id: int, error: DiptychError) -> None: ...

    def on_tokens(self, tokens: decode_pb2.SequenceTokens) -> None: ...

    def on_decode_event(self, event: decode_pb2.DecodeEvent) -> None: ...

    def on_reservation_lost(self, sequence_id: int, message: str) -> None: ...


class Untraced:
    """An observer of a request that nobody traces."""

    attempt_context = Context()

    is_traced = False

    def placed(self, placement: Placement, why: Explanation) -> None: ...

    def foretold(self, forecast: Forecast) -> None: ...

    def prefill_asked(self, worker: WorkerId) -> Context:
        return Context()

    def decode_asked(self, worker: WorkerId) -> Context:
        return Context()

    def started(self) -> None: ...

    def retried(self, retry: Retry, cause: DiptychError, awaited: Stage) -> None: ...

    def ran_locally(self, why: Why) -> None: ...

    def waits(self, why: Waits) -> None: ...

    def failed(self, cause: DiptychError) -> None: ...

    def written(self, num_tokens: int, gap_s: float | None) -> None: ...


@dataclass
class World:
    """One prefill and one decode worker, and what placement knows of their caches."""

    cluster: Cluster
    cache: CacheIndex
    services: Services

    def request(self, prompt: tuple[int, ...] = PROMPT, claim: Claim = NO_CLAIM) -> Dispatch:
        """One that has asked for a placement; ``num_believed`` is of the last one's prompt."""
        dispatch = self.dispatch(resolved(prompt, claim, max_tokens=4))
        dispatch.place(Query(num_tokens=len(prompt), num_max_tokens=len(prompt) + 4))
        self.keys = dispatch._keys or ()
        return dispatch

    def dispatch(self, request: ResolvedRequest) -> Dispatch:
        terms = Terms(request, self.services)
        return Dispatch("r", request, terms, self.services, Untraced())

    def num_believed(self, worker: WorkerId) -> int:
        return self.cache.num_hit_blocks(worker.incarnation, self.keys)

    def tells(self, worker: WorkerId, keys: Sequence[bytes] = ()) -> None:
        """It holds these, and nothing else."""
        assert self.cache.told(worker.incarnation, whole(keys))

    def welcomes(self, worker: WorkerId) -> DecodeLink:
        """The stream to the decode worker is open."""
        link = self.cluster._decode[worker.address].link
        welcome = decode_pb2.Welcome(incarnation=worker.incarnation)
        link._handle(decode_pb2.DecodeEvent(welcome=welcome))
        return link

    def says(self, worker: WorkerId, role: worker_pb2.WorkerRole, **more: Any) -> None:
        state = worker_pb2.WorkerState(
            incarnation=worker.incarnation,
            role=role,
            state=worker_pb2.SERVING_STATE_READY,
            **more,
        )
        watches = (member.watch for member in self.cluster._members())
        next(watch for watch in watches if watch.address == worker.address)._update(state)


def opened(monkeypatch: pytest.MonkeyPatch) -> World:
    """Both workers are ready and have told that they hold nothing."""
    monkeypatch.setattr(peer_channel, "open_channel", lambda address, timers: FakeChannel())
    monkeypatch.setattr(WorkerWatch, "channel", FakeChannel())
    config, cache = RouterConfig(model="m"), CacheIndex(100)
    policy = LeastLoaded(cache, local_below_tokens=0, allow_local=True, allow_recompute=True)
    cluster = Cluster(config, policy, incarnation="r", text_digest="", on_change=lambda: None)
    cluster.set_members(
        Targets(prefill=frozenset([PREFILL.address]), decode=frozenset([DECODE.address]))
    )

    def spawn(task: Coroutine[Any, Any, None], name: str) -> None:
        task.close()

    services = Services(
        config=config,
        cluster=cluster,
        policy=policy,
        room=WaitingRoom(max_waiting=1, max_placed=9, schedule=lambda pump: None),
        lengths=OutputLengths(),
        incarnation="r",
        sequence_ids=count(1),
        spawn=spawn,
    )
    world = World(cluster, cache, services)
    world.says(PREFILL, worker_pb2.WORKER_ROLE_PREFILL)
    world.says(DECODE, worker_pb2.WORKER_ROLE_DECODE)
    world.tells(PREFILL)
    world.tells(DECODE)
    return world


def resolved(
    prompt: tuple[int, ...] = PROMPT, claim: Claim = NO_CLAIM, *, max_tokens: int
) -> ResolvedRequest:
    shape = RequestShape(prompt_ids=prompt, max_tokens=max_tokens, stop_token_ids=frozenset())
    return ResolvedRequest(shape=shape, sampling=SamplingParams(max_tokens=max_tokens), claim=claim)


def started(
    world: World,
    config: RouterConfig,
    claim: Claim = NO_CLAIM,
    *,
    front: bool = False,
    beside: WorkerId | None = None,
) -> Session:
    """One that waits for a placement."""
    shape = RequestShape(prompt_ids=PROMPT, max_tokens=4, stop_token_ids=frozenset())
    session = Session(
        "r",
        ResolvedRequest(shape=shape, sampling=SamplingParams(max_tokens=4), claim=claim),
        create_autospec(
            ResponseBuilder,
            instance=True,
            is_due=False,
            is_overfull=False,
            num_output_tokens=0,
            moments=Moments(0.0),
        ),
        Untraced(),
        replace(world.services, config=config),
        deadline_s=None,
        on_failed=lambda: None,
        beside=beside,
    )
    session.start(front=front)
    return session

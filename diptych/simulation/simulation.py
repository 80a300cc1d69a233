"""A whole run: requests go through a simulated cluster, and what came of it. Pure."""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from diptych.block_hash import block_keys
from diptych.request_class import RequestClass
from diptych.simulation.agenda import Agenda
from diptych.simulation.attempt import Request
from diptych.simulation.cluster import SimulatedCluster, Split, Workers
from diptych.simulation.gaps import Gaps
from diptych.simulation.journey import UNFINISHED, Foretold, Journey
from diptych.simulation.outcome import Outcome
from diptych.simulation.router import RouterLimits, SimulatedRouter, Wires
from diptych.simulation.worker import SimulatedWorker
from diptych.simulation.workload import Shape, prompt_ids
from router.placement.cache_index import CacheIndex
from router.placement.guarded import Guarded
from router.placement.least_loaded import LeastLoaded
from router.placement.policy import Policy
from router.placement.predicted import Predicted
from router.placement.query import NO_OBJECTIVES, Objectives

_NUM_SLICES = 200  # of a run, between two reports of its progress
_LINE_PAUSE_S = 1.0  # after one that was refused
_MOST_BLOCKS = 100_000  # of each worker's cache, that the router knows of


class Placing(NamedTuple):
    """Which policy places, and how it is set."""

    name: str = "least-loaded"  # or predicted
    objectives: Objectives = NO_OBJECTIVES  # of each request
    local_below_tokens: int = 64
    is_guarded: bool = True  # as the router's predicted is
    may_refuse: bool = False  # requests whose objectives it foretells to be missed
    but_never: frozenset[int] = frozenset()  # of those that come, in order
    cuts_off: bool = False  # answers: each request allows as many tokens as its answer has

    def policy(self, seed: int, router: int = 0) -> Policy:
        """The router's own, of that number."""
        plain = LeastLoaded(
            CacheIndex(_MOST_BLOCKS),
            local_below_tokens=self.local_below_tokens,
            allow_local=True,
            allow_recompute=True,
            router_incarnation=f"simulated {seed}" + (f" {router}" if router else ""),
        )
        if self.name == "least-loaded":
            return plain
        chance = random.Random(seed).random
        return Guarded(plain, chance) if self.is_guarded else Predicted(plain, chance)


class BatchLoad(NamedTuple):
    """Lines of a batch beside the requests: when one has ended, the next is sent."""

    num_at_once: int = 0
    num_prompt_tokens: int = 64
    num_output_tokens: int = 64


class Setup(NamedTuple):
    """Everything but the requests."""

    split: Split
    workers: Workers
    wires: Wires = Wires()
    limits: RouterLimits = RouterLimits()
    placing: Placing = Placing()
    seed: int = 0
    divide: float = 1.0  # of the trace's lengths, for the prefixes that requests share
    num_routers: int = 1  # to which requests go in turn
    batch: BatchLoad = BatchLoad()


class PoolUse(NamedTuple):
    """How much of one role's workers was used, as ratios, until nobody came and all had ended."""

    busy_ratio: float  # of their time, in steps
    kv_ratio: float  # of their blocks, held by somebody, on average
    hit_ratio: float  # of admitted tokens, found in the prefix cache
    num_preemptions: int


class Run(NamedTuple):
    """What came of it. ``outcomes`` are in order of arrival, as ``due_s``; a batch has none."""

    due_s: list[float]
    outcomes: list[Outcome]
    refusals: dict[str, int]  # by reason; those that did not finish in time are UNFINISHED
    gaps: Gaps
    pools: dict[str, PoolUse]
    num_events: int
    num_steps: int
    num_lines: int = 0  # of a batch, that were answered
    foretold: Sequence[Foretold] = ()  # first tokens of requests, by whoever foretells them


class Simulation:
    """One cluster, made for one run."""

    def __init__(self, setup: Setup, shapes: Iterator[Shape]) -> None:
        """``shapes`` are in order of time."""
        self.agenda = Agenda()
        self.journeys: list[Journey] = []  # of the requests, and not of a batch
        self.num_lines = 0  # of a batch, answered
        self.cluster = SimulatedCluster(
            setup.split,
            setup.workers,
            setup.wires,
            setup.limits,
            [setup.placing.policy(setup.seed, each) for each in range(setup.num_routers)],
            self.agenda,
            setup.seed,
        )
        self._divide = setup.divide
        self._placing = setup.placing
        self._max_model_len = min(
            setup.workers.decode.max_model_len, setup.workers.prefill.max_model_len
        )
        self._shapes = shapes
        self._num_ended = 0
        self._ended_s = 0.0  # when the last one did
        self._numbers = itertools.count()
        self._batch = setup.batch
        self._lines: dict[Journey, None] = {}  # under way
        for _ in range(setup.batch.num_at_once):
            self.agenda.at(0.0, self._send_line)
        self._await_next()

    @property
    def num_open(self) -> int:
        """Requests that came and have not ended."""
        return len(self.journeys) - self._num_ended

    def run(
        self, duration_s: float, drain_s: float, progress: Callable[[float], None] = lambda s: None
    ) -> Run:
        """Until so long after the last arrival, or until nothing is left to happen."""
        slice_s = duration_s / _NUM_SLICES
        for turn in range(1, _NUM_SLICES + 1):
            self.agenda.run(turn * slice_s)
            progress(turn / _NUM_SLICES)
        self.agenda.run(duration_s + drain_s)
        for host in self.cluster.hosts:
            host.engine.end_count()
        is_over = not (self.num_open or self._lines)
        length_s = max(duration_s, self._ended_s) if is_over else self.agenda.now_s
        for journey in [*self.journeys, *self._lines]:  # no line follows these
            journey.cut_off()
        return self._result(length_s)

    def _await_next(self) -> None:
        shape = next(self._shapes, None)
        if shape is not None:
            self.agenda.at(shape.at_s, lambda: self._arrive(shape))

    def _arrive(self, shape: Shape) -> None:
        place, placing = len(self.journeys), self._placing
        router = self.cluster.routers[place % len(self.cluster.routers)]
        request = self._request(router, shape)._replace(
            objectives=placing.objectives,
            may_refuse=placing.may_refuse and place not in placing.but_never,
            is_cut_off=placing.cuts_off,
        )
        journey = Journey(router, request, self._ended)
        self.journeys.append(journey)
        journey.arrive()
        self._await_next()

    def _request(self, router: SimulatedRouter, shape: Shape) -> Request:
        number = next(self._numbers)
        num_prompt = min(shape.num_prompt_tokens, self._max_model_len - 2)
        shape = shape._replace(num_prompt_tokens=num_prompt)
        ids = prompt_ids(shape, number, self._divide)
        num_output = min(shape.num_output_tokens, self._max_model_len - len(ids))
        keys = tuple(block_keys(ids, router.block_size))
        return Request(
            number,
            shape.at_s,
            ids,
            num_output,
            keys,
            request_class=shape.request_class,
            tenant=shape.tenant,
        )

    def _ended(self, journey: Journey) -> None:
        self._num_ended += 1
        self._ended_s = self.agenda.now_s

    def _send_line(self) -> None:
        router, batch = self.cluster.routers[0], self._batch
        shape = Shape(self.agenda.now_s, batch.num_prompt_tokens, batch.num_output_tokens)
        request = self._request(router, shape)
        line = Journey(router, request._replace(request_class=RequestClass.BATCH), self._line_ended)
        self._lines[line] = None
        line.arrive()

    def _line_ended(self, line: Journey) -> None:
        del self._lines[line]
        self.num_lines += line.outcome.ttft_s is not None
        if line.failure != UNFINISHED:
            self.agenda.after(_LINE_PAUSE_S if line.failure else 0.0, self._send_line)

    def _result(self, length_s: float) -> Run:
        refusals = Counter(journey.failure for journey in self.journeys if journey.failure)
        hosts = self.cluster.hosts
        cluster = self.cluster
        pools = {"prefill": cluster.prefill, "decode": cluster.decode, "soft": cluster.soft}
        return Run(
            [journey.request.due_s for journey in self.journeys],
            [journey.outcome for journey in self.journeys],
            dict(refusals),
            Gaps(host.engine.gaps for host in hosts),
            {role: _use(of_role, length_s) for role, of_role in pools.items() if of_role},
            self.agenda.num_happened,
            sum(host.engine.num_steps for host in hosts),
            self.num_lines,
            [each.first_token for each in self.journeys if each.first_token is not None],
        )


def _use(hosts: Sequence[SimulatedWorker], length_s: float) -> PoolUse:
    engines = [host.engine for host in hosts]
    whole_s = len(engines) * max(length_s, 1e-9)
    num_blocks = sum(engine.limits.num_blocks for engine in engines) / len(engines)
    looked_up = sum(engine.scheduler.num_lookup_tokens for engine in engines)
    return PoolUse(
        sum(engine.busy_s for engine in engines) / whole_s,
        sum(engine.used_block_s for engine in engines) / (whole_s * num_blocks),
        sum(engine.scheduler.num_hit_tokens for engine in engines) / max(1, looked_up),
        sum(engine.scheduler.num_preemptions for engine in engines),
    )

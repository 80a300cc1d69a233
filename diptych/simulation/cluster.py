"""All simulated workers, and the routers over them. Pure."""

import math
from typing import NamedTuple

from diptych.simulation.agenda import Agenda
from diptych.simulation.engine import EngineLimits
from diptych.simulation.noise import Noise
from diptych.simulation.router import RouterLimits, SimulatedRouter, Wires
from diptych.simulation.worker import SimulatedWorker
from diptych.step_model import StepModel
from router.placement.policy import Policy
from router.placement.views import WorkerId

_NOISE_APART = 7919  # steps, between the noise of two workers


class Split(NamedTuple):
    """How many workers of each role, and how many of both."""

    num_prefill: int = 0
    num_decode: int = 0
    num_soft: int = 0

    @property
    def name(self) -> str:
        """As on the command line."""
        numbers = zip(("prefill", "decode", "soft"), self, strict=True)
        return ",".join(f"{role}={num}" for role, num in numbers if num)


class Workers(NamedTuple):
    """What all workers of a role have in common; one of both roles has the limits of decode."""

    prefill: EngineLimits
    decode: EngineLimits
    model: StepModel
    is_noisy: bool = True
    may_leap: bool = True
    told: StepModel | None = None  # what they say that their steps take; None: what they take
    told_until_s: float = math.inf  # then they say what is true
    models: tuple[StepModel, ...] = ()  # of each its own: prefill, both roles, decode; or ``model``


class SimulatedCluster:
    """Owns the workers and the routers, each of which sees all workers."""

    def __init__(
        self,
        split: Split,
        workers: Workers,
        wires: Wires,
        limits: RouterLimits,
        policies: list[Policy],
        agenda: Agenda,
        seed: int,
    ) -> None:
        """``policies``: of each router its own."""
        self._workers = workers
        self._agenda = agenda
        self.noise = Noise(seed, is_on=workers.is_noisy)
        self._num_hosts = 0
        self.prefill = self._hosts("prefill", split.num_prefill, workers.prefill)
        self.soft = self._hosts("soft", split.num_soft, workers.decode)
        self.decode = self._hosts("decode", split.num_decode, workers.decode)
        computing, decoding = [*self.prefill, *self.soft], [*self.decode, *self.soft]
        self.routers = [
            SimulatedRouter(
                f"router-{index}", computing, decoding, wires, limits, policy, agenda, seed + index
            )
            for index, policy in enumerate(policies)
        ]
        for host in self.hosts:
            host.tell_cache()

    @property
    def hosts(self) -> list[SimulatedWorker]:
        """All workers."""
        return [*self.prefill, *self.soft, *self.decode]

    def _hosts(self, role: str, num: int, limits: EngineLimits) -> list[SimulatedWorker]:
        return [self._host(f"{role}-{index}", limits) for index in range(num)]

    def _host(self, name: str, limits: EngineLimits) -> SimulatedWorker:
        models = self._workers.models
        model = models[self._num_hosts] if models else self._workers.model
        self._num_hosts += 1
        host = SimulatedWorker(
            WorkerId(f"{name}:1", name),
            limits,
            model,
            self._agenda,
            self.noise,
            first_step=_NOISE_APART * self._num_hosts,
            may_leap=self._workers.may_leap,
        )
        if self._workers.told is not None:
            host.engine.tell(self._workers.told, self._workers.told_until_s)
        return host

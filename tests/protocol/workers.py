"""Simulated workers: the production state machines over a fake memory, without threads or tasks."""

from collections.abc import Callable
from typing import NamedTuple

from diptych.engine.scheduling.block_pool import BlockPool
from diptych.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from diptych.engine.scheduling.step import SequenceUpdate, StepPlan
from diptych.timers import Timers
from kvtransfer.config import DigestLevel
from router.placement.views import WorkerId
from tests.protocol.fake_model import Memory
from tests.protocol.invariants import Watch

BLOCK_SIZE = 2
MAX_LEN = 16
NUM_BLOCKS = 10
TIMERS = Timers()
Clock = Callable[[], float]


class Setting(NamedTuple):
    """What all workers of a cluster share."""

    clock: Clock
    watch: Watch
    digest_level: DigestLevel


class Worker:
    """What both roles share: an engine whose steps begin and end at any time."""

    def __init__(self, identity: WorkerId, setting: Setting) -> None:
        self.identity = identity
        self.setting = setting
        self.clock = setting.clock
        self.alive = True
        self.memory = Memory(NUM_BLOCKS, BLOCK_SIZE, setting.watch)
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE, self.memory.needs)
        config = SchedulerConfig(max_num_seqs=3, max_batched_tokens=4, max_model_len=MAX_LEN)
        self.scheduler = Scheduler(config, self.pool)
        self.plan: StepPlan | None = None
        self.waits = False  # for blocks: no step can be made before something else happens

    @property
    def can_step(self) -> bool:
        return self.plan is not None or (self.scheduler.has_work and not self.waits)

    def step(self) -> None:
        """Begin a step, or end the one in flight."""
        if self.plan is None:
            self.plan = self.scheduler.schedule()
            self.waits = self.plan is None
            if self.plan is not None:
                self.memory.begin(self.plan, self.scheduler.in_flight)
            return
        plan, self.plan = self.plan, None
        output = self.memory.execute(plan, self.scheduler.in_flight)
        self.on_step(self.scheduler.update(plan, output))

    def on_step(self, updates: list[SequenceUpdate]) -> None:
        raise NotImplementedError

    def tick(self) -> None:
        """Time has passed."""
        raise NotImplementedError

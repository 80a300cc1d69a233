"""A scheduler and a runner stepped by hand, with one step in flight or two."""

from collections import deque
from collections.abc import Sequence

from diptych.engine.launched_step import LaunchedStep
from diptych.engine.runner import Runner
from diptych.engine.scheduling.block_pool import BlockPool
from diptych.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from diptych.engine.scheduling.sequence import Sequence as Generated
from diptych.engine.scheduling.sequence import SequenceKey
from diptych.engine.scheduling.step import SequenceUpdate, StepPlan
from diptych.sampling_params import SamplingParams


class StepRig:
    """As many steps in flight as ``max_steps``, whatever the runner could have."""

    def __init__(self, runner: Runner, pool: BlockPool, max_model_len: int, max_steps: int) -> None:
        self.runner, self.max_steps = runner, max_steps
        config = SchedulerConfig(max_model_len=max_model_len, max_batched_tokens=24, max_num_seqs=8)
        self.scheduler = Scheduler(config, pool)
        self.steps: deque[tuple[StepPlan, LaunchedStep]] = deque()
        self.num_steps = 0
        self.num_ahead = 0  # of these, launched while another was in flight
        self.updates: list[SequenceUpdate] = []

    def add(self, number: int, prompt: Sequence[int], params: SamplingParams) -> Generated:
        seq = Generated(
            key=SequenceKey("router", number),
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            sampling=params,
        )
        self.scheduler.reserve(seq)
        self.scheduler.start(seq, [], compute_missing=True)
        return seq

    def step(self) -> None:
        """Launch what can be, and book the oldest step."""
        while len(self.steps) < self.max_steps:
            plan = self.scheduler.schedule()
            if plan is None:
                break
            self.num_steps += 1
            self.num_ahead += bool(self.steps)
            self.steps.append((plan, self.runner.launch(plan)))
        plan, step = self.steps.popleft()
        self.updates += self.scheduler.update(plan, step.wait())

    def run(self) -> None:
        """To the end of all that was added."""
        while self.scheduler.has_work or self.steps:
            self.step()

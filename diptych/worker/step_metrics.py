"""Feeds the engine's metrics after each step. Event loop only."""

from diptych.telemetry.families import EngineMetrics
from diptych.telemetry.metrics import Metrics
from diptych.worker.engine_parts import EngineParts


class StepMetrics:
    """Owns the EngineMetrics of one worker; ``book`` is called after each step."""

    def __init__(self, metrics: Metrics, parts: EngineParts) -> None:
        self._parts = parts
        scheduler, pool = parts.scheduler, parts.pool
        self.engine = EngineMetrics(
            metrics,
            lambda: pool.counts()._asdict().items(),
            lambda: scheduler.num_running,
            lambda: scheduler.num_waiting,
        )
        self._num_preemptions = 0
        self._num_lookup_tokens = 0
        self._num_hit_tokens = 0

    def book(self) -> None:
        """Count the step that was just completed, and what happened since the one before."""
        step, scheduler = self._parts.engine.last_step, self._parts.scheduler
        if step is not None:
            self.engine.steps.inc()
            self.engine.step_seconds.observe(step.duration_s)
            self.engine.computed_tokens["prefill"].inc(step.num_prefill_tokens)
            self.engine.computed_tokens["decode"].inc(step.num_decode_tokens)
        self.engine.preemptions.inc(scheduler.num_preemptions - self._num_preemptions)
        self.engine.prefix_lookup_tokens.inc(scheduler.num_lookup_tokens - self._num_lookup_tokens)
        self.engine.prefix_hit_tokens.inc(scheduler.num_hit_tokens - self._num_hit_tokens)
        self._num_preemptions = scheduler.num_preemptions
        self._num_lookup_tokens = scheduler.num_lookup_tokens
        self._num_hit_tokens = scheduler.num_hit_tokens

"""Feeds the engine's metrics after each step. Event loop only."""

from diptych.telemetry.families import EngineMetrics
from diptych.telemetry.metrics import Metrics
from diptych.worker.engine_parts import EngineParts


class StepMetrics:
    """Owns the EngineMetrics of one worker; ``book`` is called after each step."""

    def __init__(self, metrics: Metrics, parts: EngineParts) -> None:
        engine = self._engine = parts.engine
        self.engine = EngineMetrics(
            metrics,
            lambda: engine.load().blocks._asdict().items(),
            lambda: engine.load().num_running,
            lambda: engine.load().num_waiting,
        )
        self._booked = engine.load()

    def book(self) -> None:
        """Count the step that was just completed, and what happened since the one before."""
        step, before, now = self._engine.last_step, self._booked, self._engine.load()
        if step is not None:
            self.engine.steps.inc()
            self.engine.step_seconds.observe(step.duration_s)
            self.engine.computed_tokens["prefill"].inc(step.num_prefill_tokens)
            self.engine.computed_tokens["decode"].inc(step.num_decode_tokens)
        self.engine.preemptions.inc(now.num_preemptions - before.num_preemptions)
        self.engine.yielded["blocks"].inc(now.num_batch_preemptions - before.num_batch_preemptions)
        self.engine.yielded["place"].inc(now.num_set_aside - before.num_set_aside)
        self.engine.yielded["step"].inc(now.num_sat_out - before.num_sat_out)
        self.engine.prefix_lookup_tokens.inc(now.num_lookup_tokens - before.num_lookup_tokens)
        self.engine.prefix_hit_tokens.inc(now.num_hit_tokens - before.num_hit_tokens)
        self._booked = now

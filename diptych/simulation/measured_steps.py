"""Step models of real workers, from which simulated ones take their time."""

import json
import math
from pathlib import Path

from diptych.errors import ConfigurationError
from diptych.step_model import NUM_KNOWN_STEPS, ROW_COUNTS, StepCost, StepModel

DEMO_NAME = "the demo model, float32 on one core (fitted to docs/benchmarks.md, noise assumed)"
# Decode of 1, 8 and 16 sequences at a context of 512: 43, 68 and 94 ms; prefill of 512 and 2,048
# tokens alone: 596 and 2,761 ms. One step in ten takes a tenth longer, which is no measurement.
DEMO = StepModel(
    StepCost(0.038, 0.0015, 4.1e-6, 0.0, 0.0, 1.1, NUM_KNOWN_STEPS),
    StepCost(0.115, 0.0015, 4.1e-6, 0.00082, 4.6e-7, 1.1, NUM_KNOWN_STEPS),
)
_NAMES = StepCost._fields


def read_steps(path: Path) -> StepModel:
    """From a file with ``step_model``: the costs of both kinds of step, as workers tell them.

    ``python -m tests.bench.step_model`` and ``diptych simulate --save-steps`` write such files.
    Raises ConfigurationError that names what is wrong.
    """
    try:
        told = json.loads(path.read_text())["step_model"]
        model = StepModel(cost_of(told["decode"]), cost_of(told["prefill"]))
    except OSError as error:
        raise ConfigurationError(f"--steps: {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"--steps: {path}: {error!r}") from None
    for kind, cost in model._asdict().items():
        if not cost.is_known:
            raise ConfigurationError(f"--steps: {path}: {kind}: too few steps to rely on")
    return model


def text(model: StepModel) -> str:
    """The file's content."""
    costs = {kind: cost._asdict() for kind, cost in model._asdict().items()}
    return json.dumps({"step_model": costs}, indent=1) + "\n"


def cost_of(told: object) -> StepCost:
    """As such a file has it; what is left out is 0. Raises ValueError, TypeError."""
    if not isinstance(told, dict):
        raise ValueError("a cost is a table of numbers")
    unknown = set(told) - set(_NAMES)
    if unknown:
        raise ValueError(f"no such part of a cost: {min(unknown)}")
    more_row_s = told.get("more_row_s", ())
    if not isinstance(more_row_s, list | tuple) or len(more_row_s) > len(ROW_COUNTS):
        raise ValueError(f"more_row_s is no list of {len(ROW_COUNTS)} numbers")
    more = tuple(map(float, more_row_s))
    values = {str(name): float(value) for name, value in told.items() if name != "more_row_s"}
    if not all(math.isfinite(value) and value >= 0 for value in (*values.values(), *more)):
        raise ValueError("a cost is below 0 or not finite")
    cost = StepCost()._replace(**values)  # type: ignore[arg-type]
    return cost._replace(num_steps=int(cost.num_steps), more_row_s=more)

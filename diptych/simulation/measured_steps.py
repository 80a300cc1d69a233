"""Step models of real workers, from which simulated ones take their time."""

import json
import math
import reprlib
from pathlib import Path

from diptych.errors import ConfigurationError
from diptych.step_model import MOST_S, NUM_KNOWN_STEPS, ROW_COUNTS, StepCost, StepModel

DEMO_NAME = "the demo model, float32 on one core (fitted to docs/benchmarks.md, noise assumed)"
# Decode of 1, 8 and 16 sequences at a context of 512: 43, 68 and 94 ms; prefill of 512 and 2,048
# tokens alone: 596 and 2,761 ms. One step in ten takes a tenth longer, which is no measurement.
DEMO = StepModel(
    StepCost(0.038, 0.0015, 4.1e-6, 0.0, 0.0, 1.1, NUM_KNOWN_STEPS),
    StepCost(0.115, 0.0015, 4.1e-6, 0.00082, 4.6e-7, 1.1, NUM_KNOWN_STEPS),
)
_NAMES = StepCost._fields
_COUNTS = ("num_steps", "num_trials")
_MOST_STEPS = 2.0**63


def read_steps(path: Path) -> StepModel:
    """From a file with ``step_model``: the costs of both kinds of step, as workers tell them.

    ``python -m tests.bench.step_model`` and ``diptych simulate --save-steps`` write such files.
    Raises ConfigurationError that names what is wrong.
    """
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ConfigurationError(f"--steps: {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"--steps: {path}: is no JSON: {error}") from None
    told = content.get("step_model") if isinstance(content, dict) else None
    if not isinstance(told, dict):
        raise ConfigurationError(f"--steps: {path}: step_model: expected decode and prefill")
    costs = {}
    for kind in StepModel._fields:
        try:
            costs[kind] = cost_of(told.get(kind))
        except ValueError as error:
            raise ConfigurationError(f"--steps: {path}: {kind}: {error}") from None
        if not costs[kind].is_known:
            raise ConfigurationError(f"--steps: {path}: {kind}: too few steps to rely on")
    return StepModel(**costs)


def text(model: StepModel) -> str:
    """The file's content."""
    costs = {kind: cost._asdict() for kind, cost in model._asdict().items()}
    return json.dumps({"step_model": costs}, indent=1) + "\n"


def cost_of(told: object) -> StepCost:
    """As such a file has it; what is left out is 0. Raises ValueError that names the part."""
    if not isinstance(told, dict):
        raise ValueError("a cost is a table of numbers")
    unknown = set(told) - set(_NAMES)
    if unknown:
        raise ValueError(f"no such part of a cost: {min(unknown)}")
    more_row_s = told.get("more_row_s", ())
    if not isinstance(more_row_s, list | tuple) or len(more_row_s) > len(ROW_COUNTS):
        raise ValueError(f"more_row_s is no list of {len(ROW_COUNTS)} numbers")
    values = {name: _number(name, told[name]) for name in told if name != "more_row_s"}
    more = tuple(_number("more_row_s", each) for each in more_row_s)
    counts = {name: int(value) for name, value in values.items() if name in _COUNTS}
    return StepCost()._replace(**{**values, **counts}, more_row_s=more)  # type: ignore[arg-type]


def _number(name: str, value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (ValueError, TypeError, OverflowError):
        number = math.nan
    most = _MOST_STEPS if name in _COUNTS else MOST_S
    if not 0 <= number <= most:
        raise ValueError(
            f"{name}: expected a number from 0 to {most:g} (got {reprlib.repr(value)})"
        )
    return number

"""``diptych simulate``: what would so many workers give?"""

import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import Progress, TaskID

from diptych import __version__, settings
from diptych.errors import ConfigurationError
from diptych.simulation.cluster import Split
from diptych.simulation.measured_steps import DEMO_NAME, text
from diptych.simulation.outcome import Objective, medians
from diptych.simulation.plot import line_chart
from diptych.simulation.report import Case, Measured, document, series, table
from diptych.simulation.settings import SimulationConfig
from diptych.simulation.simulation import Placing, Setup, Simulation
from diptych.simulation.trace_file import read_trace
from diptych.simulation.workload import Shape, mean_gap_s
from diptych.step_model import StepModel
from router.placement.query import Objectives

_NUM_UNLOADED = 16  # requests, one at a time
_UNLOADED_GAP_S = 600.0
_LEAST_GAP_S = 1e-6  # on average; times of a trace are no finer


def run(args: list[str]) -> int:
    """Simulate, print, write; the exit code. Raises KeyboardInterrupt, all of that done, again."""
    config = settings.load(
        SimulationConfig, args, prog="diptych simulate", env_prefix="DIPTYCH_SIMULATE_"
    )
    model = config.step_model()
    _check_writable(config)
    shapes = _read(config)
    measured = _measure(config, model, shapes)
    print(table(measured))  # noqa: T201
    print(f"steps of {config.steps or DEMO_NAME}")  # noqa: T201
    for line in _cut(config, shapes):
        print(line)  # noqa: T201
    if config.json_ is not None:
        told = {**document(measured, _environment(config, model)), "divide": config.divide}
        _write("--json", config.json_, json.dumps(told, indent=1) + "\n")
    if config.svg is not None:
        title = "Goodput over time (simulated)"
        drawn = line_chart(series(measured), title=title, across="s", up="requests/s")
        _write("--svg", config.svg, drawn)
    if config.save_steps is not None:
        _write("--save-steps", config.save_steps, text(model))
    num, num_asked = len(measured.cases), len(list(_combinations(config)))
    if num < num_asked:
        print(f"broken off: {num} of {num_asked} runs")  # noqa: T201
        raise KeyboardInterrupt
    return 0


def _read(config: SimulationConfig) -> Sequence[Shape]:
    """The trace. Raises ConfigurationError."""
    shapes = read_trace(config.trace)
    if not config.rate and mean_gap_s(shapes) < _LEAST_GAP_S:
        raise ConfigurationError("--trace: all of it comes at one moment; --rate says how often")
    return shapes


def _cut(config: SimulationConfig, shapes: Sequence[Shape]) -> Iterator[str]:
    """Said of what is longer than workers take, where --max-prompt and --max-output let it be."""
    most, lengths = config.max_model_len - 2, config.lengths
    prompts = [lengths.prompt(shape.num_prompt_tokens) for shape in shapes]
    outputs = [lengths.output(shape.num_output_tokens) for shape in shapes]
    pairs = zip(prompts, outputs, strict=True)
    num = sum(output > config.max_model_len - min(prompt, most) for prompt, output in pairs)
    if num:
        yield f"{num} of the trace's {len(shapes)} answers cut by --max-model-len"
    num = sum(prompt > most for prompt in prompts)
    if num:
        yield f"{num} of the trace's {len(shapes)} prompts cut to {most} tokens by --max-model-len"


def _measure(config: SimulationConfig, model: StepModel, shapes: Sequence[Shape]) -> Measured:
    """Ctrl-C breaks it off: what there was before is told. Raises KeyboardInterrupt of nothing."""
    unit = unloaded(config, model, shapes)
    goal = Objective(config.ttft_multiple * unit.ttft_s, config.tpot_multiple * unit.tpot_s)
    cases: list[Case] = []
    try:
        with Progress(console=Console(file=sys.stderr), transient=True) as shown:
            for split, placement, rate in _combinations(config):
                name = f"{split.name} {placement}" + ("" if rate is None else f" {rate:g}/s")
                bar = shown.add_task(name, total=1.0)
                setup = _setup(config, model, split, placement, goal)
                simulation = Simulation(setup, config.requests(shapes, rate))
                told = partial(_show, shown, bar)
                done = simulation.run(config.duration_s, config.drain_s, told)
                arrived = len(done.outcomes) / config.duration_s
                cases.append(Case(split, placement, arrived if rate is None else rate, done))
    except KeyboardInterrupt:
        if not cases:
            raise
    return Measured(unit, goal, config.duration_s, cases)


def _show(shown: Progress, bar: TaskID, share: float) -> None:
    shown.update(bar, completed=share)


def _combinations(config: SimulationConfig) -> Iterator[tuple[Split, str, float | None]]:
    rates: Sequence[float | None] = config.rate or [None]
    for rate in rates:
        for split in config.splits:
            for placement in config.placement:
                yield split, placement, rate


def _setup(
    config: SimulationConfig, model: StepModel, split: Split, placement: str, goal: Objective
) -> Setup:
    objectives = Objectives(goal.ttft_s, goal.tpot_s)
    return Setup(
        split,
        config.engines(model),
        config.wires(),
        config.limits(),
        Placing(
            placement,
            objectives,
            config.local_prefill_below_tokens,
            may_refuse=config.refuse_unreachable,
        ),
        config.seed,
        config.divide,
        config.routers,
    )


def unloaded(config: SimulationConfig, model: StepModel, shapes: Sequence[Shape]) -> Objective:
    """Medians of requests that have two colocated engines to themselves."""
    every = max(1, len(shapes) // _NUM_UNLOADED)
    spread = [
        shape._replace(at_s=place * _UNLOADED_GAP_S, prefix=())
        for place, shape in enumerate(shapes[::every][:_NUM_UNLOADED])
    ]
    alone = config.model_copy(
        update={
            "drift_ratio": 1.0,
            "speed": 1.0,
            "routers": 1,
            "local_prefill": True,  # such an engine does everything
            "duration_s": spread[-1].at_s + 1e-4,
        }
    )
    setup = _setup(alone, model, Split(0, 2), "least-loaded", Objective(1.0, 1.0))
    simulation = Simulation(setup, alone.requests(spread, None))
    done = simulation.run(_UNLOADED_GAP_S * len(spread), _UNLOADED_GAP_S)
    if not any(outcome.ttft_s is not None for outcome in done.outcomes):
        raise ConfigurationError("--trace: no request of it can be answered by such workers")
    return medians(done.outcomes)


def _environment(config: SimulationConfig, model: StepModel) -> dict[str, object]:
    return {
        "simulated": True,
        "version": __version__,
        "settings": config.model_dump(mode="json", exclude={"json_", "svg", "save_steps"}),
        "step_model": {kind: cost._asdict() for kind, cost in model._asdict().items()},
    }


def _check_writable(config: SimulationConfig) -> None:
    """Of what takes minutes nothing is lost. Raises ConfigurationError."""
    asked = {"--json": config.json_, "--svg": config.svg, "--save-steps": config.save_steps}
    for flag, path in asked.items():
        if path is not None:
            _write(flag, path, "", mode="a")


def _write(flag: str, path: Path, content: str, mode: Literal["a", "w"] = "w") -> None:
    try:
        with path.open(mode) as file:
            file.write(content)
    except OSError as error:
        raise ConfigurationError(f"{flag}: {path}: {error.strerror}") from None

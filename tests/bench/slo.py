"""The lengths of a trace, and the best of several settings. Pure."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from diptych.simulation.workload import Shape


class Lengths(NamedTuple):
    """Tokens of one request."""

    prompt: int
    output: int


def best(by_setting: Mapping[str, float]) -> tuple[str, float]:
    """The setting with the largest goodput, the first of equals, and that goodput."""
    name = max(by_setting, key=lambda key: by_setting[key])
    return name, by_setting[name]


def scaled(
    shapes: Iterable[Shape], divisor: float, max_prompt: int, max_output: int
) -> list[Lengths]:
    """Lengths of a trace's requests, each divided and clipped.

    At least one prompt token and two output tokens remain, so that every request has a TPOT.
    """
    return [
        Lengths(
            prompt=min(max_prompt, max(1, round(shape.num_prompt_tokens / divisor))),
            output=min(max_output, max(2, round(shape.num_output_tokens / divisor))),
        )
        for shape in shapes
    ]

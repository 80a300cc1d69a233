"""The lengths of a trace, and the best of several settings. Pure."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class Lengths(NamedTuple):
    """Tokens of one request."""

    prompt: int
    output: int


def best(by_setting: Mapping[str, float]) -> tuple[str, float]:
    """The setting with the largest goodput, the first of equals, and that goodput."""
    name = max(by_setting, key=lambda key: by_setting[key])
    return name, by_setting[name]


def read_azure(path: Path, divisor: float, max_prompt: int, max_output: int) -> list[Lengths]:
    """Lengths of the Azure LLM inference trace of 2023, each divided and clipped.

    The file's columns are TIMESTAMP, ContextTokens, GeneratedTokens. At least one
    prompt token and two output tokens remain, so that every request has a TPOT.
    """
    with path.open(newline="") as file:
        return [
            Lengths(
                prompt=min(max_prompt, max(1, round(int(row["ContextTokens"]) / divisor))),
                output=min(max_output, max(2, round(int(row["GeneratedTokens"]) / divisor))),
            )
            for row in csv.DictReader(file)
        ]

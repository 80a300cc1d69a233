"""The committed golden references: prompts, greedy tokens and margins per model.

Of each model there are two sets: one whose margins are all clear, and ``NEAR_TIES``, whose
answers come closer to another token than any engine is exact. Made by ``make_reference.py`` with
Hugging Face transformers in float32.
"""

import json
from pathlib import Path
from typing import NamedTuple

NEAR_TIES = "near_ties"


class GoldenPrompt(NamedTuple):
    """One prompt and its greedy continuation, end-of-sequence ignored."""

    token_ids: list[int]  # of the prompt
    output_ids: list[int]
    margins: list[float]  # top logit minus runner-up, one per token of output_ids


def fixture_path(model: str, kind: str = "") -> Path:
    """Where the references of ``model`` lie; ``kind`` is empty or ``NEAR_TIES``."""
    return Path(__file__).with_name(f"{model}_{kind}.json" if kind else f"{model}.json")


def load_reference(model: str, kind: str = "") -> list[GoldenPrompt]:
    """All golden prompts of ``model``, shortest first."""
    content = json.loads(fixture_path(model, kind).read_text())
    return [GoldenPrompt(**prompt) for prompt in content["prompts"]]

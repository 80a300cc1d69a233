"""The committed golden references: prompts, greedy tokens and margins per model.

Made by ``make_reference.py`` with Hugging Face transformers in float32.
"""

import json
from pathlib import Path
from typing import NamedTuple


class GoldenPrompt(NamedTuple):
    """One prompt and its greedy continuation, end-of-sequence ignored."""

    token_ids: list[int]  # of the prompt
    output_ids: list[int]
    margins: list[float]  # top logit minus runner-up, one per token of output_ids


def fixture_path(model: str) -> Path:
    """Where the references of ``model`` lie."""
    return Path(__file__).with_name(f"{model}.json")


def load_reference(model: str) -> list[GoldenPrompt]:
    """All golden prompts of ``model``, shortest first."""
    content = json.loads(fixture_path(model).read_text())
    return [GoldenPrompt(**prompt) for prompt in content["prompts"]]

"""Write the golden references: ``python -m tests.golden.make_reference [MODEL...]``.

Takes a few minutes. The prompts are natural text cut to lengths around every
block (16) and chunk (64, 256, 512) boundary; each starts at another paragraph.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch
import transformers

from diptych.progress import ConsoleProgress, Progress
from tests import hf_reference
from tests.golden.models import MODELS, golden_folder
from tests.golden.reference import GoldenPrompt, fixture_path

LENGTHS: tuple[int, ...] = (
    1,
    2,
    15,
    16,
    17,
    31,
    32,
    33,
    63,
    64,
    65,
    127,
    255,
    256,
    257,
    511,
    512,
    513,
)
LENGTHS += (1024, 1500)
NUM_TOKENS = 64


def main(wanted: Sequence[str]) -> None:
    torch.set_num_threads(1)
    with ConsoleProgress() as progress:
        for name in wanted or MODELS:
            folder = golden_folder(name, progress)
            prompts = [
                _reference(folder, ids, f"{name}: prompt of {len(ids)} tokens", progress)
                for ids in make_prompts(folder)
            ]
            _write(name, prompts)


def make_prompts(folder: Path) -> list[list[int]]:
    """One prompt per length; no two start alike."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    paragraphs = Path(__file__).with_name("paragraphs.txt").read_text().strip().split("\n\n")
    prompts = []
    for index, length in enumerate(LENGTHS):
        rotated = paragraphs[index:] + paragraphs[:index]
        ids = tokenizer.encode("\n\n".join(rotated)).ids
        if len(ids) < length:
            raise ValueError(f"paragraphs.txt has only {len(ids)} tokens")
        prompts.append(ids[:length])
    return prompts


def _reference(folder: Path, ids: list[int], stage: str, progress: Progress) -> GoldenPrompt:
    progress(stage, 0.0)
    run = hf_reference.greedy(folder, ids, NUM_TOKENS)
    progress(stage, 1.0)
    return GoldenPrompt(ids, run.token_ids, [float(f"{margin:.5g}") for margin in run.margins])


def _write(name: str, prompts: list[GoldenPrompt]) -> None:
    made_with = {"transformers": transformers.__version__, "torch": torch.__version__}
    lines = ",\n".join(json.dumps(prompt._asdict(), separators=(",", ":")) for prompt in prompts)
    text = f'{{"made_with": {json.dumps(made_with)},\n"prompts": [\n{lines}\n]}}\n'
    fixture_path(name).write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Write the golden references: ``python -m tests.golden.make_reference [MODEL...]``.

Takes a few minutes. The prompts are natural text cut to lengths around every
block (16) and chunk (64, 256, 512) boundary; each starts at another paragraph, and
where transformers itself came close to a tie, some words later: such a reference
would say less.
"""

import itertools
import json
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import tokenizers
import torch
import transformers

from diptych.progress import ConsoleProgress
from tests import golden_rule, hf_reference
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
MIN_MARGIN = 2 * golden_rule.MARGIN


def main(wanted: Sequence[str]) -> None:
    torch.set_num_threads(1)
    with ConsoleProgress() as progress:
        for name in wanted or MODELS:
            folder = golden_folder(name, progress)
            prompts = []
            for index, length in enumerate(LENGTHS):
                stage = f"{name}: prompt of {length} tokens"
                progress(stage, 0.0)
                prompts.append(_reference(folder, index, length))
                progress(stage, 1.0)
            _write(name, prompts)


def _reference(folder: Path, index: int, length: int) -> GoldenPrompt:
    """The prompt starting at paragraph ``index``, less as many words as avoid a near tie."""
    for num_dropped_words in itertools.count():
        ids = _prompt(folder, index, num_dropped_words)[:length]
        if len(ids) < length:
            raise ValueError("paragraphs.txt is too short")
        run = hf_reference.greedy(folder, ids, NUM_TOKENS)
        if min(run.margins) >= MIN_MARGIN:
            break
    return GoldenPrompt(ids, run.token_ids, [float(f"{margin:.5g}") for margin in run.margins])


def _prompt(folder: Path, index: int, num_dropped_words: int) -> list[int]:
    paragraphs = Path(__file__).with_name("paragraphs.txt").read_text().strip().split("\n\n")
    text = "\n\n".join(paragraphs[index:] + paragraphs[:index])
    text = text.split(" ", num_dropped_words)[-1]
    ids: list[int] = _tokenizer(folder).encode(text).ids
    return ids


@cache
def _tokenizer(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def _write(name: str, prompts: list[GoldenPrompt]) -> None:
    made_with = {"transformers": transformers.__version__, "torch": torch.__version__}
    lines = ",\n".join(json.dumps(prompt._asdict(), separators=(",", ":")) for prompt in prompts)
    text = f'{{"made_with": {json.dumps(made_with)},\n"prompts": [\n{lines}\n]}}\n'
    fixture_path(name).write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])

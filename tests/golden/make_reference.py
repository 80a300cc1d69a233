"""Write the golden references: ``python -m tests.golden.make_reference [--near-ties] [MODEL...]``.

Takes a few minutes; the near ties take longer, because they are rare. The prompts are natural
text cut to lengths around every block (16) and chunk (64, 256, 512) boundary; each starts at
another paragraph, and where transformers itself came close to a tie, some words later. With
``--near-ties`` it is the other way round: the first prompts are kept whose answers come close to
a tie, with tokens to follow it, and do not repeat themselves. Of a large vocabulary that takes
hours; ``--first-token`` finds prompts at whose very next token the tie is, in minutes.
"""

import argparse
import itertools
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import tokenizers
import torch
import transformers

from diptych.progress import ConsoleProgress, Progress
from tests import golden_rule, hf_reference
from tests.golden.models import MODELS, golden_folder
from tests.golden.reference import NEAR_TIES, GoldenPrompt, fixture_path

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


NEAR_TIE_LENGTHS = (24, 48, 100)
NUM_NEAR_TIES = 4
MAX_CUT = 300  # tokens of a prompt that is cut at a tie: it fits the pool that preempts
MIN_DISTINCT = 36  # of NUM_TOKENS
MIN_TOKENS_AFTER = 8  # a near tie at the end would show nothing


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the golden references")
    parser.add_argument("--near-ties", action="store_true", help="write that set alone")
    parser.add_argument("--first-token", action="store_true", help="the tie is there")
    parser.add_argument("model", nargs="*", default=MODELS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with ConsoleProgress() as progress:
        for name in options.model:
            folder = golden_folder(name, progress)
            if options.near_ties:
                search = _tied_cuts if options.first_token else _near_ties
                tied = itertools.islice(search(folder), NUM_NEAR_TIES)
                found = _shown(tied, progress, f"{name}: near ties", NUM_NEAR_TIES)
                _write(name, found, NEAR_TIES)
            else:
                clear = (_reference(folder, *each) for each in enumerate(LENGTHS))
                _write(name, _shown(clear, progress, f"{name}: prompts", len(LENGTHS)))


def _shown(
    prompts: Iterator[GoldenPrompt], progress: Progress, stage: str, num: int
) -> list[GoldenPrompt]:
    found = []
    for number, prompt in enumerate(prompts, start=1):
        found.append(prompt)
        progress(stage, number / num)
    return found


def _near_ties(folder: Path) -> Iterator[GoldenPrompt]:
    """Prompts whose answers come close to a tie, with tokens to follow it, shortest first."""
    for length, num_dropped_words in itertools.product(NEAR_TIE_LENGTHS, range(0, 60, 7)):
        prompts = [_prompt(folder, i, num_dropped_words)[:length] for i in range(len(LENGTHS))]
        for ids, is_tied in zip(prompts, _may_be_tied(folder, prompts), strict=True):
            if is_tied and _is_tied(run := hf_reference.greedy(folder, ids, NUM_TOKENS)):
                yield _golden(ids, run)


def _tied_cuts(folder: Path) -> Iterator[GoldenPrompt]:
    """Natural text cut where the next token is close to a tie; one cut of a text."""
    for num_dropped_words, index in itertools.product(range(0, 60, 7), range(len(LENGTHS))):
        text = _prompt(folder, index, num_dropped_words)[:MAX_CUT]
        top = torch.cat(
            [rows.topk(2).values for rows in hf_reference.logit_chunks(folder, text, MAX_CUT // 4)]
        )
        close = (top[:, 0] - top[:, 1] < golden_rule.MARGIN / 2).nonzero()
        for position in close.flatten().tolist()[:1]:
            ids = text[: position + 1]
            run = hf_reference.greedy(folder, ids, NUM_TOKENS)
            if run.margins[0] < golden_rule.MARGIN / 2:
                yield _golden(ids, run)


def _is_tied(run: golden_rule.Run) -> bool:
    is_diverse = len(set(run.token_ids)) >= MIN_DISTINCT
    return is_diverse and min(run.margins[:-MIN_TOKENS_AFTER]) < golden_rule.MARGIN / 2


@torch.inference_mode()
def _may_be_tied(folder: Path, prompts: list[list[int]]) -> list[bool]:
    """Of equally long prompts, all at once, which is fast and a little less exact."""
    model = hf_reference.load(folder)
    ids, cache_ = torch.tensor(prompts), None
    runs = [golden_rule.Run([], []) for _ in prompts]
    for _ in range(NUM_TOKENS):
        logits, cache_ = hf_reference.next_logits(model, ids, cache_)
        top = torch.topk(logits, 2)
        for run, values, indices in zip(runs, top.values, top.indices, strict=True):
            run.token_ids.append(int(indices[0]))
            run.margins.append(float(values[0] - values[1]))
        ids = top.indices[:, :1]
    return list(map(_is_tied, runs))


def _reference(folder: Path, index: int, length: int) -> GoldenPrompt:
    """The prompt starting at paragraph ``index``, less as many words as avoid a near tie."""
    for num_dropped_words in itertools.count():
        ids = _prompt(folder, index, num_dropped_words)[:length]
        if len(ids) < length:
            raise ValueError("paragraphs.txt is too short")
        run = hf_reference.greedy(folder, ids, NUM_TOKENS)
        if min(run.margins) >= MIN_MARGIN:
            break
    return _golden(ids, run)


def _golden(token_ids: list[int], run: golden_rule.Run) -> GoldenPrompt:
    margins = [float(f"{margin:.5g}") for margin in run.margins]
    return GoldenPrompt(token_ids, run.token_ids, margins)


def _prompt(folder: Path, index: int, num_dropped_words: int) -> list[int]:
    paragraphs = Path(__file__).with_name("paragraphs.txt").read_text().strip().split("\n\n")
    text = "\n\n".join(paragraphs[index:] + paragraphs[:index])
    text = text.split(" ", num_dropped_words)[-1]
    ids: list[int] = _tokenizer(folder).encode(text).ids
    return ids


@cache
def _tokenizer(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def _write(name: str, prompts: list[GoldenPrompt], kind: str = "") -> None:
    made_with = {"transformers": transformers.__version__, "torch": torch.__version__}
    lines = ",\n".join(json.dumps(prompt._asdict(), separators=(",", ":")) for prompt in prompts)
    text = f'{{"made_with": {json.dumps(made_with)},\n"prompts": [\n{lines}\n]}}\n'
    fixture_path(name, kind).write_text(text)


if __name__ == "__main__":
    main()

"""The engine left alone with its own tokens: each is transformers' best, up to margins.

transformers is asked once behind each text what it would have said at every place of it, so what
follows a near tie is compared as well.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from diptych.engine.backends.base import Backend
from diptych.engine.kv.cache import KVCache
from diptych.engine.runner import Runner
from diptych.engine.scheduling.block_pool import BlockPool
from diptych.sampling_params import SamplingParams
from tests.engines import load_decoder
from tests.gpu.golden import BFLOAT16_RATIO, BLOCK_SIZE, FLOAT32_ERROR, Shape, reference
from tests.step_rig import StepRig

NUM_PROMPT = 40  # tokens of the first prompt; each next one has as many more


@dataclass(frozen=True, slots=True)
class FreeRun:
    """Of one shape. Margins are of logits, by transformers in float32."""

    shape: str
    dtype: str
    num_tokens: int
    num_ties: int  # tokens that are not its best
    furthest: float  # below its best
    margin: float  # that far at the most: twice the error that logits may have
    holds: bool


def check(
    shape: Shape,
    backend: Backend,
    dtypes: Sequence[torch.dtype],
    *,
    num_seqs: int = 4,
    num_tokens: int = 48,
) -> Iterator[FreeRun]:
    """Greedy sequences at once, their prompts in chunks beside single tokens.

    In another type than float32 logits may be as far off as transformers' are in it, up to a half.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = shape.write(name)
        for dtype in dtypes:
            texts = run(folder, shape.vocab_size, backend, dtype, num_seqs, num_tokens)
            asked = [text[:-1] for text in texts]
            device = backend.device
            truth = torch.cat(reference(folder, asked, num_tokens, torch.float32, device))
            error = FLOAT32_ERROR
            if dtype is not torch.float32:
                other = torch.cat(reference(folder, asked, num_tokens, dtype, device))
                error = BFLOAT16_RATIO * float((other - truth).abs().max())
            yield judged(shape, dtype, texts, truth, 2 * error)


def judged(
    shape: Shape, dtype: torch.dtype, texts: Sequence[list[int]], truth: Tensor, margin: float
) -> FreeRun:
    """truth: logits before each of the last tokens of all texts, [num_tokens, vocab_size]."""
    num_tokens = len(truth) // len(texts)
    said = torch.tensor([text[-num_tokens:] for text in texts]).view(-1, 1)
    below = truth.max(1).values - truth.gather(1, said).squeeze(1)
    furthest = float(below.max())
    return FreeRun(
        shape=shape.name,
        dtype=str(dtype).removeprefix("torch."),
        num_tokens=len(said),
        num_ties=int((below > 0).sum()),
        furthest=furthest,
        margin=margin,
        holds=furthest <= margin,  # not the other way round: a NaN is no agreement
    )


def run(
    folder: Path,
    vocab_size: int,
    backend: Backend,
    dtype: torch.dtype,
    num_seqs: int,
    num_tokens: int,
) -> Sequence[list[int]]:
    """Prompts and what follows them, as the engine goes on."""
    longest = num_seqs * NUM_PROMPT + num_tokens
    num_blocks = num_seqs * (1 + longest // BLOCK_SIZE) + 1
    model = load_decoder(folder, dtype, backend=backend)
    cache = KVCache(model.config, num_blocks, BLOCK_SIZE, dtype, backend.kv_memory)
    runner = Runner(model, cache, backend)
    rig = StepRig(runner, BlockPool(num_blocks, BLOCK_SIZE), longest, runner.steps_in_flight)
    generator = torch.Generator().manual_seed(3)
    seqs = []
    for number in range(num_seqs):
        count = (number + 1) * NUM_PROMPT
        prompt: list[int] = torch.randint(5, vocab_size, (count,), generator=generator).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens)
        seqs.append(rig.add(number, prompt, params))
    rig.run()
    return [list(seq.token_ids) for seq in seqs]

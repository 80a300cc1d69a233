"""Int8 and bfloat16 against transformers, teacher-forced, and what they cost in perplexity.

Tolerance: the root mean square of the differences between the engine's logits and
those of transformers in the same format, beside that between the latter and float32.
"""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from diptych.engine.kv_cache import KVCache
from diptych.engine.model import Decoder
from diptych.engine.model_config import ModelConfig
from diptych.engine.runner import Runner
from diptych.engine.step import Chunk, StepPlan
from diptych.engine.weights import Quantization, load_weights
from tests import hf_reference
from tests.golden.models import MODELS, golden_model

BLOCK_SIZE = 16
CHUNK = 256
PROMPT_LEN = 257
TEXT_LEN = 1024
# Roundings that fall otherwise spread through the layers: two right engines differ by about
# what the format itself costs. One wrong layer is several times that.
MAX_ERROR_RATIO = {"int8": 1.1, "bfloat16": 1.4}
MIN_AGREEING_RATIO = 0.92
MAX_PERPLEXITY_RATIO = 1.03

pytestmark = pytest.mark.timeout(600)


class Format(NamedTuple):
    name: str
    dtype: torch.dtype
    quantization: Quantization
    reference: Callable[[Path], Any]


FLOAT32 = Format("float32", torch.float32, "none", hf_reference.load)
BFLOAT16 = Format(
    "bfloat16", torch.bfloat16, "none", partial(hf_reference.load, dtype=torch.bfloat16)
)
INT8 = Format("int8", torch.float32, "int8", hf_reference.load_int8)


def engine_logits(folder: Path, token_ids: list[int], format_: Format) -> Tensor:
    """Logits after every token, computed in chunks over paged KV: [num_tokens, vocab_size]."""
    config = ModelConfig.from_folder(folder)
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    cache = KVCache(config, num_blocks, BLOCK_SIZE, format_.dtype)
    weights = load_weights(folder, config, format_.dtype, quantization=format_.quantization)
    runner = Runner(Decoder(config, weights), cache)
    rows = []
    for start in range(0, len(token_ids), CHUNK):
        chunk = Chunk(
            token_ids=tuple(token_ids[start : start + CHUNK]),
            start=start,
            block_table=tuple(range(num_blocks)),
            sample=None,
        )
        rows.append(runner.logits(StepPlan(chunks=(chunk,), sequences=())))
    return torch.cat(rows)


def distance(a: Tensor, b: Tensor) -> float:
    """Root mean square of the differences."""
    return math.sqrt(float((a - b).square().mean()))


def perplexity(logits: Tensor, token_ids: list[int]) -> float:
    """Of each token after the first, given those before it."""
    loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(token_ids[1:]))
    return math.exp(float(loss))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("format_", [INT8, BFLOAT16], ids=lambda format_: format_.name)
def test_teacher_forced(name: str, format_: Format) -> None:
    model = golden_model(name)
    prompt = next(p for p in model.prompts if len(p.token_ids) == PROMPT_LEN)
    token_ids = [*prompt.token_ids, *prompt.output_ids]
    exact = hf_reference.logits(model.folder, token_ids)
    want = hf_reference.logits(model.folder, token_ids, format_.reference)
    got = engine_logits(model.folder, token_ids, format_)
    loss, error = distance(want, exact), distance(got, want)
    agreeing = float((got.argmax(1) == want.argmax(1)).float().mean())
    print(  # noqa: T201
        f"{name} {format_.name}: logits {error:.3f} from transformers', which are {loss:.3f} from "
        f"float32 (spread {float(exact.std()):.2f}); same best token: {agreeing:.3f}"
    )
    assert error <= MAX_ERROR_RATIO[format_.name] * loss
    assert agreeing >= MIN_AGREEING_RATIO


@pytest.mark.parametrize("name", MODELS)
def test_perplexity(name: str) -> None:
    model = golden_model(name)
    token_ids = next(p for p in model.prompts if len(p.token_ids) == TEXT_LEN).token_ids
    exact, int8 = (
        perplexity(engine_logits(model.folder, token_ids, format_), token_ids)
        for format_ in (FLOAT32, INT8)
    )
    print(f"{name}: perplexity {exact:.3f} in float32, {int8:.3f} in int8")  # noqa: T201
    assert int8 <= MAX_PERPLEXITY_RATIO * exact

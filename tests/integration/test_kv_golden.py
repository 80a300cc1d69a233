"""What bfloat16, int8 and fp8 in the cache cost a real model, teacher-forced, float32 weights.

The prompt is computed in chunks, the rest token by token through the compiled decode
attention, all on what the cache kept. The reference is transformers in float32.
"""

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from diptych.engine.kv.cache import KVCache
from diptych.engine.model.decoder import Decoder
from diptych.engine.runner import Runner
from tests import hf_reference
from tests.engine_logits import chunk_logits, perplexity
from tests.engines import CPU, load_decoder
from tests.golden.models import golden_model
from tests.notes import Note
from tests.torch_threads import torch_threads

BLOCK_SIZE = 16
PROMPT_LEN = 513
NUM_DECODED = 16
CHUNK = 128

pytestmark = pytest.mark.timeout(300)


class Limits(NamedTuple):
    """Of all tokens, against float32; logits reach about 30."""

    logit: float  # the worst difference of any
    divergence: float  # mean Kullback-Leibler divergence, nats
    perplexity: float  # relative change


# Measured: 8e-5, 0.22, 0.73 and 2.4; 3e-9, 2e-5, 7e-4 and 5.5e-3; 1e-6, 3e-5, 1e-4 (of half the
# text 6e-3) and 1.3e-2.
LIMITS = {
    torch.float32: Limits(1e-3, 1e-7, 1e-5),
    torch.bfloat16: Limits(0.3, 1e-4, 1e-3),
    torch.int8: Limits(1.5, 1.5e-3, 5e-3),
    torch.float8_e4m3fn: Limits(4.5, 1.2e-2, 3e-2),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return load_decoder(golden_model("smollm2").folder)


@pytest.fixture(scope="module")
def token_ids() -> list[int]:
    prompts = golden_model("smollm2").prompts
    prompt = next(p for p in prompts if len(p.token_ids) == PROMPT_LEN)
    return [*prompt.token_ids, *prompt.output_ids][: PROMPT_LEN + NUM_DECODED]


@pytest.fixture(scope="module")
def reference(token_ids: list[int]) -> Tensor:
    return hf_reference.logits(golden_model("smollm2").folder, token_ids)


def engine_logits(decoder: Decoder, dtype: torch.dtype, token_ids: list[int]) -> Tensor:
    """After every token: [num_tokens, vocab_size]."""
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    runner = Runner(decoder, KVCache(decoder.config, num_blocks, BLOCK_SIZE, dtype), CPU)
    whole, rest = divmod(PROMPT_LEN, CHUNK)
    chunks = [*[CHUNK] * whole, rest, *[1] * (len(token_ids) - PROMPT_LEN)]
    return torch.cat(list(chunk_logits(runner, token_ids, chunks, range(num_blocks))))


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_close_to_float32(
    dtype: torch.dtype, decoder: Decoder, token_ids: list[int], reference: Tensor, note: Note
) -> None:
    got = engine_logits(decoder, dtype, token_ids)
    worst = float((got - reference).abs().max())
    divergence = torch.nn.functional.kl_div(
        got.log_softmax(1), reference.log_softmax(1), log_target=True, reduction="batchmean"
    )
    exact, lossy = perplexity(reference, token_ids), perplexity(got, token_ids)
    note(
        f"{dtype} cache: largest logit difference {worst:.2g}, divergence {divergence:.2g} nats, "
        f"perplexity {exact:.4f} to {lossy:.4f}"
    )
    limits = LIMITS[dtype]
    assert worst <= limits.logit
    assert abs(float(divergence)) <= limits.divergence
    assert abs(lossy / exact - 1) <= limits.perplexity

"""The golden rule on a device: the engine on random weights of real shapes against transformers.

In float32 both say the same up to rounding. In bfloat16 neither is right: the engine may be no
further from transformers in float32 than transformers in bfloat16 is, up to a half.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from diptych.engine.backends.base import Backend
from diptych.engine.kv.cache import KVCache
from diptych.engine.runner import Runner
from tests import hf_reference
from tests.engine_logits import chunk_logits
from tests.engines import load_decoder
from tests.tiny_model import write_tiny_model

BLOCK_SIZE = 32
NUM_DECODED = 8
FLOAT32_ERROR = 2e-3  # of logits that spread by 3
BFLOAT16_RATIO = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model's, with as many of its layers as are worth the time."""

    name: str
    family: str
    num_layers: int
    num_tokens: int
    sizes: Mapping[str, object]  # entries of config.json
    vocab_size: int = 32_000

    def write(self, folder: Path | str) -> Path:
        """A folder with random weights of it."""
        return write_tiny_model(
            folder,
            self.family,
            vocab_size=self.vocab_size,
            num_layers=self.num_layers,
            shape=self.sizes,
        )


SHAPES = (
    Shape(
        name="Qwen3-0.6B",
        family="qwen3",
        num_layers=28,
        num_tokens=2000,
        sizes={
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40_960,
            "rope_theta": 1_000_000.0,
        },
    ),
    Shape(
        name="Llama-3.1-8B",
        family="llama",
        num_layers=4,
        num_tokens=4000,
        sizes={
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131_072,
            "rope_theta": 500_000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    Shape(
        name="Gemma 3 4B",
        family="gemma3",
        num_layers=6,
        num_tokens=2000,
        sizes={
            "hidden_size": 2560,
            "intermediate_size": 10_240,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 1024,
            "max_position_embeddings": 131_072,
        },
    ),
)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of one shape. Errors are of logits, against transformers in float32."""

    shape: str
    num_layers: int
    num_tokens: int
    float32_error: float  # the largest of the engine's
    bfloat16_ratio: float  # the engine's root mean square by that of transformers, in bfloat16
    holds: bool


def check(shape: Shape, backend: Backend, dtypes: Sequence[torch.dtype]) -> Agreement:
    """Prefill in two chunks, then single tokens, on blocks in no order.

    dtypes: what the engine is tried in, of float32 and bfloat16; of others nothing is held
    against it.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = shape.write(name)
        generator = torch.Generator().manual_seed(2)
        ids: list[int] = torch.randint(
            5, shape.vocab_size, (shape.num_tokens,), generator=generator
        ).tolist()
        truth = _last(folder, ids, torch.float32, backend.device)
        float32_error, ratio = 0.0, 0.0
        if torch.float32 in dtypes:
            float32_error = float((engine(folder, ids, torch.float32, backend) - truth).abs().max())
        if torch.bfloat16 in dtypes:
            own = engine(folder, ids, torch.bfloat16, backend) - truth
            other = _last(folder, ids, torch.bfloat16, backend.device) - truth
            ratio = float(own.square().mean().sqrt() / other.square().mean().sqrt())
    # Not the other way round: a NaN is no agreement.
    holds = float32_error <= FLOAT32_ERROR and ratio <= BFLOAT16_RATIO
    return Agreement(shape.name, shape.num_layers, shape.num_tokens, float32_error, ratio, holds)


def engine(folder: Path, ids: Sequence[int], dtype: torch.dtype, backend: Backend) -> Tensor:
    """Of the last tokens: [NUM_DECODED + 1, vocab_size] float32, on the host."""
    model = load_decoder(folder, dtype, backend=backend)
    num_blocks = -(-len(ids) // BLOCK_SIZE)
    cache = KVCache(model.config, num_blocks, BLOCK_SIZE, dtype, backend.kv_memory)
    cache.tensor.fill_(torch.nan)
    table = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
    chunks = (len(ids) // 3, len(ids) - len(ids) // 3 - NUM_DECODED, *([1] * NUM_DECODED))
    steps = chunk_logits(Runner(model, cache, backend), ids, chunks, table)
    return torch.cat([logits[-1:].cpu() for logits in steps][1:])


def _last(folder: Path, ids: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """What transformers says of the same tokens."""
    (last,) = reference(folder, [ids], NUM_DECODED + 1, dtype, device)
    return last


@torch.inference_mode()
def reference(
    folder: Path,
    texts: Sequence[Sequence[int]],
    num_last: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Tensor]:
    """transformers' logits after the last tokens of each: [num_last, vocab_size] float32, here."""
    model = hf_reference.load(folder, dtype).to(device)
    told = [
        model(torch.tensor([list(ids)], device=device), logits_to_keep=num_last)
        .logits[0]
        .float()
        .cpu()
        for ids in texts
    ]
    hf_reference.load.cache_clear()
    return told

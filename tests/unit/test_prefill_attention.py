"""Both kinds of prefill attention against the definition in float64."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from diptych.engine.inputs import PrefillChunk
from diptych.engine.model_config import ModelConfig
from diptych.engine.prefill_attention import SDPA, BlockedAttention, ChunkView
from diptych.engine.tiny_model import write_tiny_model

KV_HEADS, GROUP, HEAD_DIM = 2, 3, 16


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder: Path = write_tiny_model(tmp_path_factory.mktemp("model"), "gemma3")
    return ModelConfig.from_folder(folder)


def naive(q: Tensor, context: Tensor, view: ChunkView, scale: float) -> Tensor:
    out = torch.empty(q.shape, dtype=torch.float64)
    for token in range(len(q)):
        end = view.chunk.start + token + 1 - view.first
        begin = 0 if view.window is None else max(0, end - view.window)
        for head in range(q.shape[1]):
            keys, values = context[:, head // GROUP, begin:end].double()
            out[token, head] = torch.softmax(keys @ q[token, head].double() * scale, 0) @ values
    return out


@pytest.mark.parametrize("kind", [SDPA, BlockedAttention])
@pytest.mark.parametrize("window", [None, 1, 40, 300])
@pytest.mark.parametrize(("start", "num_tokens"), [(0, 1), (0, 300), (7, 128), (250, 261)])
def test_equals_the_definition(
    config: ModelConfig,
    kind: type[SDPA] | type[BlockedAttention],
    window: int | None,
    start: int,
    num_tokens: int,
) -> None:
    generator = torch.Generator().manual_seed(1)
    first = 0 if window is None else max(0, start - window + 1)
    chunk = PrefillChunk(
        begin=0, num_tokens=num_tokens, start=start, block_ids=torch.zeros(0, dtype=torch.int64)
    )
    view = ChunkView(chunk, window, first, None, slice(0))
    q = torch.randn(num_tokens, KV_HEADS * GROUP, HEAD_DIM, generator=generator) * 3
    context = torch.randn(2, KV_HEADS, chunk.end - first, HEAD_DIM, generator=generator)
    out = torch.full_like(q, float("nan"))
    kind(config)(q, context, view, out)
    assert (out - naive(q, context, view, config.attention_scale)).abs().max() < 1e-5


def test_an_enormous_score_takes_all(config: ModelConfig) -> None:
    """No overflow, whatever the scores."""
    chunk = PrefillChunk(begin=0, num_tokens=4, start=0, block_ids=torch.zeros(0).long())
    view = ChunkView(chunk, None, 0, None, slice(0))
    q, context = torch.full((4, 1, 16), 1e4), torch.zeros(2, 1, 4, 16)
    context[0, 0, 1], context[1, 0] = 1e4, torch.arange(4.0)[:, None]
    out = torch.empty_like(q)
    BlockedAttention(config)(q, context, view, out)
    assert out[:, 0, 0].tolist() == [0.0, 1.0, 1.0, 1.0]

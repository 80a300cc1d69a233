"""Both kinds of prefill attention against the definition in float64."""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from diptych.engine.backends.cpu.prefill_attention import TiledAttention
from diptych.engine.backends.torch.prefill_attention import SDPA, ChunkView, ContextAttention
from diptych.engine.inputs import PrefillChunk
from diptych.engine.model.config import ModelConfig
from tests.tiny_model import write_tiny_model

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


NO_BLOCKS = torch.zeros(0, dtype=torch.int64)


def view_of(
    start: int, num_tokens: int, window: int | None, block_ids: Tensor = NO_BLOCKS
) -> ChunkView:
    """Of a chunk of a prompt; its context begins with the first key that it sees."""
    first = 0 if window is None else max(0, start - window + 1)
    chunk = PrefillChunk(0, num_tokens, start, block_ids)
    return ChunkView(chunk, window, first, None, slice(0))


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def attend(attention: ContextAttention, q: Tensor, context: Tensor, view: ChunkView) -> Tensor:
    out = torch.full_like(q, float("nan"))
    attention(q, context, view, out)
    return out


@pytest.mark.parametrize("kind", [SDPA, TiledAttention])
@pytest.mark.parametrize("window", [None, 1, 40, 300])
@pytest.mark.parametrize(("start", "num_tokens"), [(0, 1), (0, 300), (7, 128), (250, 261)])
def test_equals_the_definition(
    config: ModelConfig,
    kind: type[SDPA] | type[TiledAttention],
    window: int | None,
    start: int,
    num_tokens: int,
) -> None:
    view = view_of(start, num_tokens, window)
    q = random(num_tokens, KV_HEADS * GROUP, HEAD_DIM) * 3
    context = random(2, KV_HEADS, view.chunk.end - view.first, HEAD_DIM)
    out = attend(kind(config), q, context, view)
    assert (out - naive(q, context, view, config.attention_scale)).abs().max() < 1e-5


@pytest.mark.parametrize(("start", "window"), [(0, None), (20_000, None), (9_000, 8_000)])
def test_masks_do_not_grow_with_chunk_and_context(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch, start: int, window: int | None
) -> None:
    """A chunk of 300 after 20,000 would need one of 6 million numbers; here it is 2**18."""
    sizes: list[int] = []
    attend_block = torch.nn.functional.scaled_dot_product_attention

    def seen(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor, scale: float) -> Tensor:
        sizes.append(attn_mask.numel())
        return attend_block(q, k, v, attn_mask=attn_mask, scale=scale)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
    monkeypatch.setattr(SDPA, "_MASK_SIZE", 1 << 18)
    view = view_of(start, 300, window)
    q = random(300, 6, HEAD_DIM)
    context = random(2, KV_HEADS, view.chunk.end - view.first, HEAD_DIM)
    out = attend(SDPA(config), q, context, view)
    few = [0, 17, 255, 299]
    for token in few:
        alone = replace(view, chunk=replace(view.chunk, start=start + token, num_tokens=1))
        ends = context[:, :, : start + token + 1 - view.first]
        want = naive(q[token : token + 1], ends, alone, config.attention_scale)
        assert (out[token] - want[0]).abs().max() < 1e-5
    assert max(sizes) <= max(1 << 18, 16 * (view.chunk.end - view.first))
    assert len(sizes) <= 300 // 16 + 1


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256, 320])
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_heads_of_any_size_and_far_scores(
    config: ModelConfig, head_dim: int, spread: float
) -> None:
    view = view_of(130, 41, None)
    q = random(41, KV_HEADS * GROUP, head_dim) * spread
    context = random(2, KV_HEADS, view.chunk.end, head_dim)
    config = replace(config, head_dim=head_dim, attention_scale=head_dim**-0.5)
    out = attend(TiledAttention(config), q, context, view)
    want = naive(q, context, view, config.attention_scale)
    # A score is as exact as float32 is at its size, and a weight no more than its score.
    assert (out - want).abs().max() < 1e-5 * spread


@pytest.mark.parametrize("window", [None, 40, 200])
def test_bits_do_not_depend_on_how_a_prompt_is_cut(config: ModelConfig, window: int | None) -> None:
    num_tokens = 300
    q = random(num_tokens, KV_HEADS * GROUP, HEAD_DIM)
    context = random(2, KV_HEADS, num_tokens, HEAD_DIM)
    attention = TiledAttention(config)
    whole = attend(attention, q, context, view_of(0, num_tokens, window))
    for start, end in pairwise([0, 1, 3, 130, 131, 256, 300]):
        view = view_of(start, end - start, window)
        part = attend(attention, q[start:end], context[:, :, view.first : end], view)
        assert torch.equal(part, whole[start:end])


def test_a_row_depends_on_what_it_sees_alone(config: ModelConfig) -> None:
    """Not on other queries, later keys, or keys before its window."""
    window, token = 40, 77
    q, view = random(100, KV_HEADS * GROUP, HEAD_DIM), view_of(0, 100, window)
    context = random(2, KV_HEADS, 100, HEAD_DIM)
    attention = TiledAttention(config)
    want = attend(attention, q, context, view)[token]
    others = torch.arange(100) != token
    q[others] = float("nan")
    unseen = (torch.arange(100) > token) | (torch.arange(100) <= token - window)
    context[:, :, unseen] = 1e30
    out = attend(attention, q, context, view)
    assert torch.equal(out[token], want)
    assert out[others].isnan().all()


@pytest.mark.parametrize("kind", [SDPA, TiledAttention])
@pytest.mark.parametrize("window", [None, 40])
def test_from_the_first_row_that_is_asked_for(
    config: ModelConfig, kind: type[SDPA] | type[TiledAttention], window: int | None
) -> None:
    """Rows before it cost nothing, and the others get what they get without it."""
    begin, start, num_tokens = 5, 70, 300
    chunk = PrefillChunk(begin, num_tokens, start, torch.zeros(0).long())
    view = replace(view_of(start, num_tokens, window), chunk=chunk)
    q = random(num_tokens, KV_HEADS * GROUP, HEAD_DIM)
    context = random(2, KV_HEADS, view.chunk.end - view.first, HEAD_DIM)
    want = attend(kind(config), q, context, view)
    last = view.asked(np.array([begin + 299, begin + 290, begin + 300, 2]))
    assert last is not None
    assert last.queries == slice(begin + 290, begin + 300)
    out = attend(kind(config), q[290:], context, last)
    torch.testing.assert_close(out, want[290:], rtol=0, atol=1e-6)
    assert view.asked(np.array([2, begin + 300])) is None


def test_context_as_the_model_made_it(config: ModelConfig) -> None:
    """The keys and values of a chunk that has no other context are not copied."""
    kv, view = random(50, 2, KV_HEADS, HEAD_DIM), view_of(0, 50, None)
    q = random(50, KV_HEADS * GROUP, HEAD_DIM)
    context = kv.permute(1, 2, 0, 3)
    attention = TiledAttention(config)
    copied = attend(attention, q, context.contiguous(), view)
    assert torch.equal(attend(attention, q, context, view), copied)


@pytest.mark.parametrize("window", [None, 40])
def test_context_in_blocks(config: ModelConfig, window: int | None) -> None:
    """Scattered blocks of a layer give the bits of a copy; other blocks are not read."""
    block_size, start, num_tokens = 8, 75, 50
    blocks = torch.full((40, 3, 2, KV_HEADS, block_size, HEAD_DIM), float("nan"))
    table = torch.tensor([7, 3, 21, 39, 0, 2, 30, 11, 12, 5, 1, 17, 20, 9, 8, 31])
    kv = random(2, KV_HEADS, len(table) * block_size, HEAD_DIM)
    blocks[table, 1] = kv.view(2, KV_HEADS, -1, block_size, HEAD_DIM).permute(2, 0, 1, 3, 4)
    view = view_of(start, num_tokens, window, table)
    q, attention = random(num_tokens, KV_HEADS * GROUP, HEAD_DIM), TiledAttention(config)
    out = torch.empty_like(q)
    attention.on_blocks(q, blocks[:, 1], view, out)
    context = kv[:, :, view.first : view.chunk.end].contiguous()
    assert torch.equal(out, attend(attention, q, context, view))


def test_an_enormous_score_takes_all(config: ModelConfig) -> None:
    """No overflow, whatever the scores."""
    q, context = torch.full((4, 1, 16), 1e4), torch.zeros(2, 1, 4, 16)
    context[0, 0, 1], context[1, 0] = 1e4, torch.arange(4.0)[:, None]
    out = attend(TiledAttention(config), q, context, view_of(0, 4, None))
    assert out[:, 0, 0].tolist() == [0.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("features", ["+avx,+avx2,+fma", "+sse2"])
def test_on_smaller_processors(features: str) -> None:
    """Compiled for another processor than this one, in a process of its own."""
    program = (
        "import torch; from types import SimpleNamespace;"
        "from diptych.engine.inputs import PrefillChunk;"
        "from diptych.engine.backends.cpu.prefill_attention import TiledAttention;"
        "from diptych.engine.backends.torch.prefill_attention import SDPA, ChunkView;"
        "config = SimpleNamespace(head_dim=144, attention_scale=0.1, score_softcap=None);"
        "chunk = PrefillChunk(0, 70, 130, torch.zeros(0).long());"
        "view = ChunkView(chunk, 150, 0, None, slice(0));"
        "q, context = torch.randn(70, 6, 144), torch.randn(2, 2, 200, 144);"
        "outs = [torch.empty_like(q) for _ in range(2)];"
        "SDPA(config)(q, context, view, outs[0]);"
        "TiledAttention(config)(q, context, view, outs[1]);"
        "torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)"
    )
    variables = {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": features, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", program], env=os.environ | variables, check=True)

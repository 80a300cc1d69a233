"""Bytes and operations of a step, counted by hand for a decoder of two layers."""

import pytest

from diptych.engine.model.config import ModelConfig
from tests.bench.roofline import (
    Ceilings,
    Operation,
    Span,
    Storage,
    flops,
    least_arithmetic_s,
    least_memory_s,
    least_s,
    num_bytes,
    operations,
)

CONFIG = ModelConfig.from_hf(
    {
        "model_type": "gemma3_text",
        "vocab_size": 100,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "max_position_embeddings": 64,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 10000.0,
    }
)
# q, k, v: 16 + 8 + 8 rows of 8; output 8 of 16; gate and up 32 of 8; down 8 of 16.
LAYER_ELEMENTS = 32 * 8 + 8 * 16 + 32 * 8 + 8 * 16
HEAD_ELEMENTS = 100 * 8
KV_BYTES = 2 * 2 * 4 * 4


def test_a_decode_step_reads_each_weight_and_its_context_once() -> None:
    ops = operations(CONFIG, Storage(4, 0, KV_BYTES), [Span.decode(10), Span.decode(3)])
    assert len(ops) == 2 * 5 + 1
    weights = 4 * (2 * LAYER_ELEMENTS + HEAD_ELEMENTS)
    # The sliding layer sees 4 of 10 and 3 of 3 tokens, the full one all.
    assert num_bytes(ops) == weights + KV_BYTES * ((4 + 3) + (10 + 3))
    linears = 2 * 2 * (2 * LAYER_ELEMENTS + HEAD_ELEMENTS)
    assert flops(ops) == linears + 4 * 16 * ((4 + 3) + (10 + 3))


def test_a_prefill_chunk_is_causal_and_only_sampled_rows_meet_the_head() -> None:
    chunk = Span(start=2, num_tokens=4, sampled=False)
    ops = operations(CONFIG, Storage(4, 0, KV_BYTES), [chunk])
    assert len(ops) == 2 * 5
    sliding, full = ops[1], ops[6]
    assert sliding.flops == 4 * 16 * (3 + 4 + 4 + 4)
    assert full.flops == 4 * 16 * (3 + 4 + 5 + 6)
    assert sliding.num_bytes == full.num_bytes == KV_BYTES * 6
    # Once the window has moved on, earlier tokens are not read: 7 to 9, and 10 itself.
    later = operations(CONFIG, Storage(4, 0, KV_BYTES), [Span(10, 1, sampled=True)])
    assert later[1].num_bytes == KV_BYTES * 4
    assert later[-1] == Operation(4 * HEAD_ELEMENTS, 2 * HEAD_ELEMENTS, is_linear=True)


def test_a_scale_is_read_with_its_row() -> None:
    (*_, head) = operations(CONFIG, Storage(1, 4, KV_BYTES), [Span.decode(1)])
    assert head.num_bytes == HEAD_ELEMENTS + 100 * 4


def test_each_operation_is_bound_by_what_it_has_more_of() -> None:
    ceilings = Ceilings(bytes_per_s=10.0, flops_per_s=100.0, linear_flops_per_s=200.0)
    ops = [
        Operation(num_bytes=50, flops=10, is_linear=True),  # 5 s of memory
        Operation(num_bytes=10, flops=600, is_linear=True),  # 3 s of arithmetic
        Operation(num_bytes=10, flops=400, is_linear=False),  # 4 s of arithmetic
    ]
    assert least_s(ops, ceilings) == pytest.approx(12.0)
    assert least_arithmetic_s(ops, ceilings) == pytest.approx(0.05 + 3.0 + 4.0)
    assert least_memory_s(ops, ceilings) == pytest.approx(5.0 + 1.0 + 1.0)

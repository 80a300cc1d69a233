"""Which layers keep the same kind of state, and models that need a kind that is not there."""

from typing import Any

import pytest

from diptych.engine.model.config import ModelConfig
from diptych.engine.model.kv_groups import KVGroup, KVKind, group_layers
from diptych.errors import ConfigurationError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


def test_layers_of_one_window_are_a_group() -> None:
    assert group_layers([None, None], 2, 16) == (KVGroup(KVKind.FULL, None, (0, 1), 2, 16),)
    assert group_layers([8, 8], 2, 16) == (KVGroup(KVKind.SLIDING, 8, (0, 1), 2, 16),)


def test_groups_that_need_more_of_the_past_come_first() -> None:
    groups = group_layers([8, 8, None, 32, 8, None], 2, 16)
    assert [(group.kind, group.window, group.layers) for group in groups] == [
        (KVKind.FULL, None, (2, 5)),
        (KVKind.SLIDING, 32, (3,)),
        (KVKind.SLIDING, 8, (0, 1, 4)),
    ]


def test_a_models_groups_have_its_heads() -> None:
    config = ModelConfig.from_hf(LLAMA | {"model_type": "mistral", "sliding_window": 32})
    assert config.kv_groups == (KVGroup(KVKind.SLIDING, 32, (0, 1, 2), 2, 16),)


def test_groups_of_a_mistral_with_types_of_layers() -> None:
    typed = {"model_type": "mistral", "sliding_window": 32}
    typed |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    assert ModelConfig.from_hf(LLAMA | typed).kv_groups == (
        KVGroup(KVKind.FULL, None, (1,), 2, 16),
        KVGroup(KVKind.SLIDING, 32, (0, 2), 2, 16),
    )


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"kv_lora_rank": 512, "model_type": "deepseek_v3"}, "kv_lora_rank=512 .* latent state"),
        ({"mamba_d_state": 128, "model_type": "bamba"}, "mamba_d_state=128 .* recurrent state"),
        (
            {"layer_types": ["linear_attention", "full_attention"], "model_type": "qwen3_next"},
            "layer_types='linear_attention' .* recurrent state",
        ),
    ],
)
def test_other_kinds_of_state_are_refused_by_the_field_that_asks(
    extra: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=rf"config\.json: {message}"):
        ModelConfig.from_hf(LLAMA | extra)


def test_fields_that_ask_for_nothing_are_no_other_kind() -> None:
    assert ModelConfig.from_hf(LLAMA | {"kv_lora_rank": None, "mamba_d_state": 0}).num_layers == 3

"""Models of one shape of attention, of which nothing else matters."""

from diptych.engine.model.config import ModelConfig
from diptych.engine.model.layer_config import Activation, LayerConfig, RopeConfig

SCALE = 0.3


def config_of(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int | None,
    score_softcap: float | None = None,
) -> ModelConfig:
    """Two layers, of which the second may look back ``window`` tokens alone."""
    rope = RopeConfig(theta=10000.0)
    return ModelConfig(
        model_type="llama",
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=1024,
        rms_norm_eps=1e-5,
        activation=Activation.SILU,
        tied_embeddings=True,
        embedding_scale=1.0,
        attention_scale=SCALE,
        score_softcap=score_softcap,
        qk_norm=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        norm_offset=0.0,
        post_norms=False,
        logit_softcap=None,
        layers=(LayerConfig(rope, None), LayerConfig(rope, window)),
        checkpoint_dtype="float32",
        storage=None,
        is_text_part=False,
    )

"""Reads a checkpoint folder into the tensors of one decoder, packed for this machine.

Knows Hugging Face's tensor names; the decoder does not. Every tensor of the
checkpoint is used, or the checkpoint is refused: an ignored bias would be a different
model. Called once per worker, off the event loop.
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from diptych.engine.model.checkpoint import (
    NOTHING_READ,
    CheckpointRead,
    CheckpointReader,
    LoadProgress,
)
from diptych.engine.model.compact import Weight
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.joined_weight import read_linear, read_weight
from diptych.engine.model.parts import Linear, WeightStore
from diptych.engine.model.ranks import ONE_RANK, GatheredLinear, Ranks, SummedLinear
from diptych.engine.model.weight_digest import WeightDigest
from diptych.errors import ConfigurationError

logger = logging.getLogger(__name__)

# How an 8-bit cache of keys and values would be scaled, which ours is not.
_KV_SCALES = (
    "kv_scale",
    "k_scale",
    "v_scale",
    "k_proj.k_scale",
    "v_proj.v_scale",
    "k_proj.output_scale",
    "v_proj.output_scale",
)
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_STORED = _DTYPES | {"float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. Norm weights are float32 and have their offset added."""

    input_norm: Tensor  # [hidden_size]
    qkv: Linear  # rows: query heads, key heads, value heads
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    output: Linear
    post_attention_norm: Tensor | None  # [hidden_size], after attention
    mlp_norm: Tensor  # before the feed-forward part
    gate_up: Linear  # rows: gate, up
    down: Linear
    post_mlp_norm: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """Everything a decoder needs, on one device and of one element type.

    Linear layers may keep their weights otherwise; they take and give that type. Of several
    ranks each has its part of all but the norms.
    """

    embedding: Weight  # [vocab_size, hidden_size], a rank's part of the rows
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden_size]
    head: Linear  # hidden_size -> vocab_size
    dtype: torch.dtype
    ranks: Ranks = ONE_RANK
    source: CheckpointRead = NOTHING_READ  # with a digest in rank 0 alone, of the whole model

    @property
    def linears(self) -> list[Linear]:
        """All, the head last."""
        layers = ((w.qkv, w.output, w.gate_up, w.down) for w in self.layers)
        return [*chain.from_iterable(layers), self.head]


def resolve_dtype(
    name: str, config: ModelConfig, auto: Callable[[torch.dtype], torch.dtype]
) -> torch.dtype:
    """The element type of weights and arithmetic for a setting: float32, bfloat16, or auto.

    auto: what a device computes in for a checkpoint of this element type.

    Raises:
        ConfigurationError: another name.
    """
    if name == "auto":
        return auto(_STORED.get(config.checkpoint_dtype, torch.float32))
    if name not in _DTYPES:
        raise ConfigurationError(f"dtype {name!r} is not one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def load_weights(
    folder: Path | str,
    config: ModelConfig,
    store: WeightStore,
    progress: LoadProgress = lambda ratio: None,
    ranks: Ranks = ONE_RANK,
) -> DecoderWeights:
    """Read, convert and keep in the store, each tensor straight into the memory where it stays.

    Beside that there is one layer's weight where the store packs it, and nothing else.
    config: of the whole model, of which a rank reads its part.

    Raises:
        ConfigurationError: a tensor is missing, unexpected, of another shape, or one that
            the store does not take; or the ranks cannot share the model out; or the files
            changed meanwhile.
    """
    share = ranks.share
    config = share.of(config)
    with WeightDigest() if share.rank == 0 else nullcontext() as digest:
        reader = CheckpointReader(
            Path(folder),
            store.dtype,
            store.device,
            progress,
            text_part=config.is_text_part,
            storage=config.storage,
            share=share,
            digest=digest,
        )
        weights = _decoder(reader, config, store, ranks, folder)
        source = reader.close()
    if reader.num_compact:
        logger.info("weights are kept compact", extra={"num_tensors": reader.num_compact})
    return replace(weights, source=source)


def _decoder(
    reader: CheckpointReader,
    config: ModelConfig,
    store: WeightStore,
    ranks: Ranks,
    folder: Path | str,
) -> DecoderWeights:
    """config: of this rank's part."""
    share = ranks.share
    num_rows, hidden_size = len(share.part(config.vocab_size)), config.hidden_size
    if config.tied_embeddings:
        _skip_tied_head(reader, config, folder)
    embedding = read_weight(reader, store, {_EMBEDDING: num_rows}, hidden_size)
    layers = tuple(
        _layer(reader, config, index, store, ranks) for index in range(config.num_layers)
    )
    if config.tied_embeddings:
        head = store.tied_head(embedding)
    else:
        head = read_linear(reader, store, {_HEAD: num_rows}, hidden_size)
    return DecoderWeights(
        embedding=embedding,
        layers=layers,
        final_norm=_norm(reader, config, "model.norm.weight", hidden_size),
        head=head if share.size == 1 else GatheredLinear(head, ranks),
        dtype=store.dtype,
        ranks=ranks,
    )


def _skip_tied_head(reader: CheckpointReader, config: ModelConfig, folder: Path | str) -> None:
    """Some checkpoints have one all the same, which transformers uses if it is another one."""
    if reader.differ(_HEAD, _EMBEDDING, config.vocab_size, config.hidden_size):
        raise ConfigurationError(
            f"{_HEAD} in {folder} differs from {_EMBEDDING}, which config.json's "
            "tie_word_embeddings says it is: set that to false to use the stored one, "
            "or remove the tensor"
        )
    reader.skip(_HEAD)


def _layer(
    reader: CheckpointReader, config: ModelConfig, index: int, store: WeightStore, ranks: Ranks
) -> LayerWeights:
    prefix = f"model.layers.{index}."
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    reader.skip(prefix + "self_attn.rotary_emb.inv_freq")
    if config.storage is not None:
        for name in _KV_SCALES:
            reader.skip(f"{prefix}self_attn.{name}")

    def by_rows(rows: dict[str, int], columns: int, has_bias: bool) -> Linear:
        names = {f"{prefix}{name}.weight": size for name, size in rows.items()}
        biases = [f"{prefix}{name}.bias" for name in rows]
        if not has_bias:
            for name in biases:
                reader.skip_zeros(name)
            return read_linear(reader, store, names, columns)
        sizes = zip(biases, rows.values(), strict=True)
        bias = torch.cat([reader.take(name, size, shared_dim=0) for name, size in sizes])
        return read_linear(reader, store, names, columns, bias)

    def by_columns(name: str, columns: int, has_bias: bool) -> Linear:
        names = {f"{prefix}{name}.weight": hidden}
        bias = None
        if has_bias and ranks.share.rank == 0:
            bias = reader.take(f"{prefix}{name}.bias", hidden)
        elif has_bias:
            reader.skip(f"{prefix}{name}.bias")
        else:
            reader.skip_zeros(f"{prefix}{name}.bias")
        part = read_linear(reader, store, names, columns, bias, shared_dim=1)
        return part if ranks.share.size == 1 else SummedLinear(part, ranks)

    def norm(name: str, size: int, present: bool = True) -> Tensor | None:
        return _norm(reader, config, f"{prefix}{name}.weight", size) if present else None

    input_norm = _norm(reader, config, prefix + "input_layernorm.weight", hidden)
    before_mlp = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
    return LayerWeights(
        input_norm=input_norm,
        qkv=by_rows(
            {"self_attn.q_proj": q_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size},
            hidden,
            config.qkv_bias,
        ),
        q_norm=norm("self_attn.q_norm", config.head_dim, config.qk_norm),
        k_norm=norm("self_attn.k_norm", config.head_dim, config.qk_norm),
        output=by_columns("self_attn.o_proj", q_size, config.output_bias),
        post_attention_norm=norm("post_attention_layernorm", hidden, config.post_norms),
        mlp_norm=_norm(reader, config, f"{prefix}{before_mlp}.weight", hidden),
        gate_up=by_rows({"mlp.gate_proj": inner, "mlp.up_proj": inner}, hidden, config.mlp_bias),
        down=by_columns("mlp.down_proj", inner, config.mlp_bias),
        post_mlp_norm=norm("post_feedforward_layernorm", hidden, config.post_norms),
    )


def _norm(reader: CheckpointReader, config: ModelConfig, name: str, size: int) -> Tensor:
    return reader.take(name, size).float() + config.norm_offset

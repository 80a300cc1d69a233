"""Names a model and a KV layout, so that two workers can tell whether they match.

A model's digest is of its config and of every byte of its weights, as they were loaded.
It tells different models, conversions and fine-tunes apart; it is no proof against
somebody who forges weights. Pure functions.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash

from diptych.engine.kv.cache import KVBlockLayout, KVCache
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.kv_groups import KVKind
from diptych.text.identity import canonical
from diptych.v1 import common_pb2
from diptych.word_sums import ALGORITHM

FORMAT_VERSION = 2  # of blocks: 2 has its layers in groups

_DIGEST_VERSION = 2

_KINDS: Mapping[KVKind, common_pb2.KVKind] = {
    KVKind.FULL: common_pb2.KV_KIND_FULL,
    KVKind.SLIDING: common_pb2.KV_KIND_SLIDING,
    KVKind.LATENT: common_pb2.KV_KIND_LATENT,
    KVKind.RECURRENT: common_pb2.KV_KIND_RECURRENT,
}


def model_digest(config: Mapping[str, Any], weights_digest: str) -> str:
    """Digest of a model: 32 hexadecimal digits.

    config: ``config.json`` without its provenance, whose keys may be in any order.
    weights_digest: of what was loaded, see :mod:`diptych.engine.model.weight_digest`.
    """
    digest = xxhash.xxh3_128(f"diptych model {_DIGEST_VERSION}\n".encode())
    digest.update(canonical(config))
    digest.update(weights_digest.encode())
    return digest.hexdigest()


def kv_layout(
    config: ModelConfig,
    kv_cache: KVCache,
    model_digest: str,
    compute_dtype: torch.dtype,
    *,
    digest_level: str = "full",
    quantization: str = "none",
    num_ranks: int = 1,
) -> common_pb2.KVLayout:
    """What another worker's cache must equal before a block may move.

    Of whole blocks: ``config`` is the whole model's, ``kv_cache`` that of any of the ranks.
    ``compute_dtype`` is that of weights and arithmetic; the cache may have another.
    """
    whole = KVBlockLayout.of(config, kv_cache.block_size, kv_cache.dtype)
    return common_pb2.KVLayout(
        format_version=FORMAT_VERSION,
        model_digest=model_digest,
        dtype=_name(kv_cache.dtype),
        block_size=kv_cache.block_size,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        tensor_parallel_size=num_ranks,
        block_bytes=whole.block_bytes,
        digest_level=digest_level,
        quantization=quantization,
        compute_dtype=_name(compute_dtype),
        groups=_groups(whole),
        digest_algorithm=ALGORITHM,
    )


def _groups(layout: KVBlockLayout) -> Iterator[common_pb2.KVGroup]:
    for group in layout.groups:
        yield common_pb2.KVGroup(
            kind=_KINDS[group.kind],
            window=group.window or 0,
            layers=group.layers,
            num_kv_heads=group.num_kv_heads,
            head_dim=group.head_dim,
            dtype=_name(layout.dtype),
            block_bytes=layout.group_bytes(group),
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

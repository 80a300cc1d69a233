"""Names a model and a KV layout, so that two workers can tell whether they match.

The digest is cheap by design: config, tensor index and a sample of the weights,
never a full read. It tells different models, conversions and fine-tunes apart;
it is no proof against somebody who forges weights. Pure functions; file I/O only
in :func:`model_digest`.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import xxhash

from diptych.engine.kv.cache import KVBlockLayout, KVCache
from diptych.engine.model.checkpoint import tensor_index
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.kv_groups import KVKind
from diptych.engine.model.shard import TensorLocation
from diptych.text.identity import canonical, read_config
from diptych.v1 import common_pb2
from diptych.word_sums import ALGORITHM

FORMAT_VERSION = 2  # of blocks: 2 has its layers in groups

_DIGEST_VERSION = 1
_NUM_PIECES, _PIECE_BYTES = 64, 4096

_KINDS: Mapping[KVKind, common_pb2.KVKind] = {
    KVKind.FULL: common_pb2.KV_KIND_FULL,
    KVKind.SLIDING: common_pb2.KV_KIND_SLIDING,
    KVKind.LATENT: common_pb2.KV_KIND_LATENT,
    KVKind.RECURRENT: common_pb2.KV_KIND_RECURRENT,
}


def model_digest(folder: Path | str) -> str:
    """Digest of the model in ``folder``: 32 hexadecimal digits.

    Covers ``config.json`` (key order and provenance aside), every tensor's name,
    shape and type, and 64 pieces of 4 KiB spread evenly over the weights' bytes.
    How tensors are split over files does not matter.

    Raises:
        ConfigurationError: a file is missing or malformed.
    """
    folder = Path(folder)
    digest = xxhash.xxh3_128(f"diptych model {_DIGEST_VERSION}\n".encode())
    digest.update(canonical(read_config(folder / "config.json")))
    index = tensor_index(folder)
    for name, location in sorted(index.items()):
        digest.update(f"{name} {location.dtype} {list(location.shape)}\n".encode())
    for piece in _pieces(index):
        digest.update(piece)
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


def _pieces(index: Mapping[str, TensorLocation]) -> Iterator[bytes]:
    """Pieces at even distances of all tensors' bytes, laid end to end by name."""
    locations = [location for _, location in sorted(index.items())]
    total = sum(location.num_bytes for location in locations)
    step = max(total // _NUM_PIECES, 1)
    begin, wanted = 0, 0
    for location in locations:
        end = begin + location.num_bytes
        if wanted < end:
            with location.path.open("rb") as file:
                while wanted < end:
                    file.seek(location.offset + wanted - begin)
                    yield file.read(min(_PIECE_BYTES, end - wanted))
                    wanted += step
        begin = end

"""Names of KV blocks by content: what the prefix cache and the router's affinity share.

A block's key is a hash chained over everything before it (its parent's key), its
own token ids, and at the root the tenant's salt, so equal keys mean equal KV,
also where somebody chooses tokens to collide: two with one key take 2^64 tries.

Pure functions. Idea: vLLM's automatic prefix caching.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, TypeAlias

KEY_BYTES: Final = 16
BlockKey: TypeAlias = bytes  # KEY_BYTES

_ROOT = b"diptych-block-key-2"  # changes with the scheme, so that old keys never match


def root_key(salt: bytes = b"", adapter: bytes = b"") -> BlockKey:
    """The parent of a first block. ``adapter`` is reserved for fine-tuned weights."""
    parts = (_ROOT, salt, adapter)
    return _digest(b"".join(struct.pack("<I", len(part)) + part for part in parts))


def block_keys(token_ids: Sequence[int], block_size: int, salt: bytes = b"") -> list[BlockKey]:
    """Keys of the whole blocks of ``token_ids``; a partial last block has none."""
    keys: list[BlockKey] = []
    extend_block_keys(keys, token_ids, block_size, salt)
    return keys


def prompt_digest(token_ids: Sequence[int], salt: bytes = b"") -> bytes:
    """16 bytes that tell sequences apart whose KV differs; also their last, partial block.

    Token ids are unsigned 32-bit; raises struct.error for others.
    """
    return _digest(root_key(salt) + struct.pack(f"<{len(token_ids)}I", *token_ids))


def extend_block_keys(
    keys: list[BlockKey], token_ids: Sequence[int], block_size: int, salt: bytes = b""
) -> None:
    """Append the keys that ``keys``, made from a prefix of ``token_ids``, lacks.

    Costs only the new blocks. Token ids are unsigned 32-bit; raises struct.error
    for others.
    """
    first, end = len(keys), len(token_ids) // block_size
    if end <= first:
        return
    parent = keys[-1] if keys else root_key(salt)
    new_ids = token_ids[first * block_size : end * block_size]
    packed = struct.pack(f"<{len(new_ids)}I", *new_ids)
    stride = 4 * block_size
    for offset in range(0, len(packed), stride):
        parent = _digest(parent + packed[offset : offset + stride])
        keys.append(parent)


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=KEY_BYTES).digest()

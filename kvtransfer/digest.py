"""Digests: of a block, of a pull, of a memory descriptor. Pure; any thread.

xxh3_128 finds every accident (truncation, reuse, a flipped bit) and no attack:
whoever can forge bytes here can read the peer's memory anyway.
"""

from collections.abc import Iterable

import xxhash

from diptych.v1 import kv_source_pb2

DIGEST_BYTES = 16


def block_digest(block: bytes | memoryview) -> bytes:
    """Digest of one whole block, unused slots included."""
    return xxhash.xxh3_128_digest(block)


def combined_digest(digests: Iterable[bytes]) -> bytes:
    """Digest over blocks' digests in order: what Confirm carries."""
    return xxhash.xxh3_128_digest(b"".join(digests))


def descriptor_digest(descriptor: kv_source_pb2.MemoryDescriptor) -> bytes:
    """Digest over every field of ``descriptor`` but ``digest`` itself."""
    digest = xxhash.xxh3_128()
    for field in (
        descriptor.agent_metadata,
        descriptor.memory_kind.encode(),
        descriptor.base_address.to_bytes(8, "little"),
        descriptor.block_bytes.to_bytes(8, "little"),
        descriptor.num_blocks.to_bytes(8, "little"),
        descriptor.device_id.to_bytes(4, "little"),
    ):
        digest.update(len(field).to_bytes(8, "little"))  # so that no byte can change fields
        digest.update(field)
    return digest.digest()

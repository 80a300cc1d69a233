"""Which sources are sound, and which lanes nixl's reads may take."""

import json
from contextlib import nullcontext

import numpy as np
import pytest

from diptych.v1 import kv_source_pb2
from kvtransfer.agents.base import Region
from kvtransfer.config import TransferConfig
from kvtransfer.digest import descriptor_digest
from kvtransfer.errors import TransportError
from kvtransfer.memory import HostMemory
from kvtransfer.transports.agent_identity import AgentIdentity
from kvtransfer.transports.lanes import Lanes, nixl_lanes, ucxx_lanes


def other_lanes(config: TransferConfig, memory_kind: str) -> Lanes:
    """Of a library without UCX."""
    return Lanes()


@pytest.mark.parametrize(
    ("library", "settings", "last_read_was_local", "is_refused"),
    [
        ("nixl", {}, True, False),
        ("nixl", {}, None, False),
        ("nixl", {}, False, True),
        ("nixl", {"ucx_tls": ["tcp"]}, True, True),  # looked at too late to tell
        ("nixl", {"ucx_tls": ["tcp", "cuda_copy"]}, True, True),  # as where a GPU is
        ("nixl", {"ucx_tls": ["tcp"], "allow_nixl_tcp": True}, False, False),
        ("nixl", {"ucx_tls": ["rc", "cma"]}, False, False),
        ("ucxx", {"ucx_tls": ["tcp"]}, False, False),
        ("other", {"ucx_tls": ["tcp"]}, False, False),
    ],
)
def test_tcp_is_refused_where_it_is_forbidden(
    library: str,
    settings: dict[str, object],
    last_read_was_local: bool | None,
    is_refused: bool,
) -> None:
    config = TransferConfig.model_validate_json(json.dumps({"allow_faults": True, **settings}))
    memory = HostMemory(np.zeros(8, np.uint8), 4)
    lanes_of = {"nixl": nixl_lanes, "ucxx": ucxx_lanes, "other": other_lanes}[library]
    identity = AgentIdentity(library, lanes_of, config, "me", memory)
    expected = (
        pytest.raises(TransportError, match=f"{library} would read over TCP")
        if is_refused
        else nullcontext()
    )
    with expected:
        identity.check_lane(last_read_was_local)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"memory_kind": "DRA\u00e9"}, "of the kind"),
        ({"memory_kind": ""}, "of the kind '', none of DRAM, VRAM"),
        ({"block_bytes": 1}, "blocks of 1 bytes, here are 4"),
        ({"num_blocks": 10**9}, "1000000000 blocks, not 1 to 1048576"),
        ({"num_blocks": 0}, "0 blocks, not 1 to"),
        ({"base_address": 2**64 - 4}, "beyond its address space"),
    ],
)
def test_a_source_that_is_not_sound_is_not_handed_to_the_library(
    wrong: dict[str, object], why: str
) -> None:
    identity = AgentIdentity(
        "nixl", nixl_lanes, TransferConfig(), "me", HostMemory(np.zeros(8, np.uint8), 4)
    )
    good = {"base_address": 4096, "block_bytes": 4, "num_blocks": 2, "memory_kind": "DRAM"}
    for fields in (good, {**good, **wrong}):
        descriptor = kv_source_pb2.MemoryDescriptor(agent_metadata=b"x")
        for name, value in fields.items():
            setattr(descriptor, name, value)
        descriptor.digest = descriptor_digest(descriptor)
        expected = pytest.raises(TransportError, match=why) if fields != good else nullcontext()
        with expected:
            assert identity.source_region(descriptor) == Region(4096, 4, 2, "DRAM", 0)

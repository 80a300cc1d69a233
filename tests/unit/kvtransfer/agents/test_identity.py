"""Which lanes nixl's reads may take."""

import json
from contextlib import nullcontext

import numpy as np
import pytest

from kvtransfer.agents.identity import AgentIdentity
from kvtransfer.config import TransferConfig
from kvtransfer.memory import HostMemory
from kvtransfer.transports.base import TransportError


@pytest.mark.parametrize(
    ("library", "settings", "last_read_was_local", "is_refused"),
    [
        ("nixl", {}, True, False),
        ("nixl", {}, None, False),
        ("nixl", {}, False, True),
        ("nixl", {"ucx_tls": ["tcp"]}, True, True),  # looked at too late to tell
        ("nixl", {"ucx_tls": ["tcp"], "allow_nixl_tcp": True}, False, False),
        ("nixl", {"ucx_tls": ["rc", "cma"]}, False, False),
        ("ucxx", {"ucx_tls": ["tcp"]}, False, False),
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
    identity = AgentIdentity(library, config, "me", memory)
    expected = pytest.raises(TransportError, match="TCP") if is_refused else nullcontext()
    with expected:
        identity.check_lane(last_read_was_local)

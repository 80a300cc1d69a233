"""What people are told of that workers say by number."""

from collections.abc import Mapping
from typing import Final, Literal

from diptych.v1 import worker_pb2

ROLE_NAMES: Final[Mapping[int, Literal["prefill", "decode"]]] = {
    worker_pb2.WORKER_ROLE_PREFILL: "prefill",
    worker_pb2.WORKER_ROLE_DECODE: "decode",
}
PAIR_STATE_NAMES: Final[Mapping[int, str]] = {
    worker_pb2.PAIR_STATE_CONNECTING: "connecting",
    worker_pb2.PAIR_STATE_PROVEN: "proven",
    worker_pb2.PAIR_STATE_FAILED: "failed",
}

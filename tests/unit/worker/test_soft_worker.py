"""What a worker of both roles says as it starts."""

import logging

import pytest

from kvtransfer.config import TransferConfig, TransportName
from soft_worker.app import warn_of_agents
from soft_worker.config import SoftWorkerConfig

INLINE: tuple[TransportName, ...] = ("inline",)
BOTH: tuple[TransportName, ...] = ("nixl", "inline")


@pytest.mark.parametrize(
    ("roles", "transports", "num_said"),
    [
        (("prefill", "decode"), BOTH, 1),
        (("prefill", "decode"), INLINE, 0),
        (("prefill",), BOTH, 0),
        (("decode",), BOTH, 0),
    ],
)
def test_one_line_warns_of_agents_that_read_both_ways(
    roles: tuple[str, ...],
    transports: tuple[TransportName, ...],
    num_said: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    transfer = TransferConfig(transports=transports)
    config = SoftWorkerConfig.model_validate({"model": "m", "roles": roles, "transfer": transfer})
    with caplog.at_level(logging.WARNING):
        warn_of_agents(config)
    assert len(caplog.records) == num_said
    assert all("replace agents again and again" in each.message for each in caplog.records)

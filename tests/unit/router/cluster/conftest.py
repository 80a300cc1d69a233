"""What tests of the cluster share."""

import pytest

from diptych.rpc import peer_channel
from tests.unit.router.cluster.world import FakeChannel


@pytest.fixture
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """No channel connects anywhere."""
    monkeypatch.setattr(peer_channel, "open_channel", lambda address, timers: FakeChannel())

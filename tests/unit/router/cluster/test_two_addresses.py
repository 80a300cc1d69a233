"""One worker that is named by two addresses. No sockets."""

import pytest

from diptych.rpc import peer_channel
from router.placement.views import WorkerId
from tests.unit.router.cluster.world import FakeChannel, World, placeable, targets, welcome


@pytest.fixture(autouse=True)
def _no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_channel, "open_channel", lambda address, timers: FakeChannel())


async def test_one_worker_at_two_addresses_is_used_at_the_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each of its streams would end the other's."""
    world = World(decode=1)
    world.cluster.set_members(targets([], ["d0:1", "d9:1"]))
    joined = world.cluster._watches["d9:1"]
    first = world.watch("d0:1")
    assert first.state is not None
    for _ in range(3):
        joined._update(first.state)
        world.says("d0:1")
    assert placeable(world) == (set(), {"d0:1"})
    assert (joined.worker, joined.can_decode) == (None, False), "no stream is opened to it"
    (line,) = (record for record in caplog.records if record.levelname == "ERROR")
    assert line.message == "the same worker at two addresses"
    assert (line.__dict__["worker"], line.__dict__["used_at"]) == ("d9:1", "d0:1")
    assert not any("lost" in record.message for record in caplog.records)


@pytest.mark.parametrize("goes", ["left", "lost", "another process"])
async def test_of_two_addresses_of_one_worker_the_other_takes_over(goes: str) -> None:
    world = World(decode=1)
    first = world.watch("d0:1")
    said = first.state
    assert said is not None
    world.cluster.set_members(targets([], ["d0:1", "d9:1"]))
    world.cluster._watches["d9:1"]._update(said)
    if goes == "left":
        world.cluster.set_members(targets([], ["d9:1"]))
    elif goes == "lost":
        first._lose("a cut line")
    else:
        world.says("d0:1", incarnation="again")
    world.cluster._watches["d9:1"]._update(said)
    assert world.cluster._watches["d9:1"].worker == WorkerId("d9:1", said.incarnation)
    first._update(said)  # when it is back
    world.link("d9:1")._handle(welcome(said.incarnation))
    assert placeable(world) == (set(), {"d9:1"})

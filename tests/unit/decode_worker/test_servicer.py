"""Which of two streams that name the same router is the router's."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from decode_worker.servicer import DecodeServicer
from decode_worker.stream import DecodeStream
from decode_worker.stream_resources import StreamDeps
from diptych.errors import DiptychError, InvalidRequestError, RouterLostError
from diptych.timers import Timers


class Stream:
    """A DecodeStream that says whether it was ended."""

    def __init__(self, peer: str, router_incarnation: str = "router.1") -> None:
        self.peer = peer
        self.router_incarnation = router_incarnation
        self.errors: list[DiptychError] = []

    def end(self, error: DiptychError) -> None:
        self.errors.append(error)


def superseded(older: Stream, newest: Stream) -> None:
    nothing = cast(Any, SimpleNamespace())
    deps = StreamDeps(status=nothing, timers=Timers(), spans=nothing, max_unsent_events=1)
    servicer = DecodeServicer(deps)
    servicer._streams = cast("set[DecodeStream]", {older, newest})
    servicer.on_hello(cast(DecodeStream, newest), "router.1")


def test_a_router_that_comes_again_ends_its_older_stream(
    caplog: pytest.LogCaptureFixture,
) -> None:
    older, newest = Stream("ipv4:10.0.0.1:5000"), Stream("ipv4:10.0.0.1:5001", "")
    superseded(older, newest)
    assert [error.message for error in older.errors] == ["the router opened a newer stream"]
    assert not newest.errors
    assert "a router opened a newer stream" in caplog.text


def test_another_host_cannot_end_a_routers_stream() -> None:
    older, newest = Stream("ipv4:10.0.0.1:5000"), Stream("ipv4:10.0.0.2:5000", "")
    with pytest.raises(InvalidRequestError, match="another host"):
        superseded(older, newest)
    assert not older.errors


def test_other_routers_are_let_alone() -> None:
    older, newest = Stream("ipv4:10.0.0.1:5000", "router.2"), Stream("ipv4:10.0.0.2:5000", "")
    superseded(older, newest)
    assert not older.errors


async def test_of_a_stream_that_is_over_nothing_is_left() -> None:
    """It hears of no steps any more, and whom it named is to be forgotten."""
    listeners: list[object] = []
    peers: dict[DecodeStream, Sequence[object]] = {}
    left: list[DecodeStream] = []

    def subscribe(listener: object) -> Callable[[], None]:
        listeners.append(listener)
        return lambda: listeners.remove(listener)

    async def run(on_command: object) -> None:
        stream.attach(cast(Any, resources))
        assert len(listeners) == 1
        assert peers == {stream: ["peer"]}
        raise RouterLostError("it is gone")

    nothing = cast(Any, SimpleNamespace(peer=lambda: "", admit_as=lambda role: None))
    pairs = SimpleNamespace(
        open_pull=None,
        quarantined_block_ids=frozenset(),
        set_peers=peers.__setitem__,
        leave=left.append,
    )
    resources = SimpleNamespace(
        parts=SimpleNamespace(engine=SimpleNamespace(subscribe=subscribe)),
        pairs=pairs,
        limits=None,
        engine_metrics=None,
        transfer_metrics=None,
    )
    deps = StreamDeps(status=nothing, timers=Timers(), spans=nothing, max_unsent_events=1)
    stream = DecodeStream(deps, nothing, nothing, lambda stream, router: None)
    stream.router_incarnation, stream._peers = "router.1", cast(Any, ["peer"])
    stream._stream = cast(Any, SimpleNamespace(run=run))
    with pytest.raises(RouterLostError):
        await stream.run()
    assert not listeners
    assert peers == {stream: ["peer"]}
    assert left == [stream]

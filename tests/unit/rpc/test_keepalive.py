"""Both ends of a connection are pinged as the timers say."""

from typing import Any

import grpc
import pytest

from diptych.rpc.channel import open_channel
from diptych.rpc.server import make_server
from diptych.timers import Timers


def test_channel_and_server_take_the_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[dict[str, int]] = []

    def capture(*args: object, options: list[tuple[str, int]], **more: Any) -> None:
        opened.append(dict(options))

    monkeypatch.setattr(grpc.aio, "insecure_channel", capture)
    monkeypatch.setattr(grpc.aio, "server", capture)
    timers = Timers(keepalive_s=0.25, keepalive_answer_s=1.5)
    open_channel("127.0.0.1:1", timers)
    make_server(timers)
    for options in opened:
        assert options["grpc.keepalive_time_ms"] == 250
        assert options["grpc.keepalive_timeout_ms"] == 1500
        assert options["grpc.http2.ping_timeout_ms"] == 1500
    assert len(opened) == 2

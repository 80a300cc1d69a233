"""Clients of the batch server that take nothing are cut off, and the log says so."""

import logging

import pytest

from batch_server.app import _on_cut
from router.untaken import Cut, Untaken


def test_who_is_cut_off_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    slow = Untaken(lambda: 0.0, 10, _on_cut).open("10.0.0.1:5")
    with caplog.at_level(logging.WARNING):
        slow.wait(11)
    (said,) = caplog.records
    assert said.message.startswith("a client was cut off")
    assert {name: said.__dict__[name] for name in Cut._fields} == {
        "client": "10.0.0.1:5", "request_id": "", "num_bytes": 11, "since_s": 0.0,
    }  # fmt: skip

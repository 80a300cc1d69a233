"""The stream of one lease, where there is no more channel for it."""

import math
from typing import Any

import grpc
import pytest

from diptych.errors import DiptychError, NoWorkerError
from diptych.rpc.channel import open_channel
from diptych.timers import Timers
from diptych.v1 import common_pb2, prefill_pb2
from router.cluster import prefill_link
from router.cluster.prefill_link import PrefillLink
from router.placement.views import WorkerId


class Ended:
    """Hears how the lease ended."""

    def __init__(self) -> None:
        self.errors: list[tuple[int, DiptychError]] = []

    def on_prefill_event(self, sequence_id: int, event: prefill_pb2.PrefillEvent) -> None:
        raise AssertionError(event)

    def on_lease_ended(self, sequence_id: int, error: DiptychError) -> None:
        self.errors.append((sequence_id, error))


def link_over(channel: grpc.aio.Channel, heard: Ended) -> PrefillLink:
    return PrefillLink(
        channel,
        prefill_pb2.PrefillStart(sequence_id=7),
        heard,
        worker=WorkerId("127.0.0.1:1", "w"),
        timers=Timers(),
    )


@pytest.mark.parametrize(
    "said",
    [
        {"logprobs": common_pb2.TokenLogprobs(logprob=math.nan)},
        {"logprobs": common_pb2.TokenLogprobs(logprob=math.inf)},
        {"margin": math.nan},
    ],
)
async def test_a_first_token_that_nobody_could_tell_on_ends_the_lease(said: dict[str, Any]) -> None:
    channel = open_channel("127.0.0.1:1")
    link = link_over(channel, Ended())
    first = prefill_pb2.FirstToken(token_id=5, position=3, **said)
    ended = link._on_event(prefill_pb2.PrefillEvent(first_token=first))
    assert isinstance(ended, NoWorkerError)
    link.close()
    await channel.close(None)


@pytest.mark.parametrize(("incarnation", "is_it"), [("w", True), ("restarted", False)])
async def test_only_the_process_that_was_asked_may_accept(incarnation: str, is_it: bool) -> None:
    class Heard(Ended):
        def on_prefill_event(self, sequence_id: int, event: prefill_pb2.PrefillEvent) -> None:
            accepted.append(event)

    accepted: list[prefill_pb2.PrefillEvent] = []
    channel = open_channel("127.0.0.1:1")
    link = link_over(channel, Heard())
    said = prefill_pb2.PrefillAccepted(incarnation=incarnation)
    ended = link._on_event(prefill_pb2.PrefillEvent(accepted=said))
    assert isinstance(ended, NoWorkerError) is not is_it
    assert len(accepted) == is_it
    link.close()
    await channel.close(None)


async def test_a_worker_that_was_left_before_its_stream_began() -> None:
    """gRPC crashes the process where a stub is made on a closed channel."""
    channel, heard = open_channel("127.0.0.1:1"), Ended()
    link = link_over(channel, heard)
    await channel.close(None)
    await link.run()
    ((sequence_id, error),) = heard.errors
    assert sequence_id == 7
    assert isinstance(error, NoWorkerError)


async def test_a_worker_has_a_moment_to_end_the_stream_of_a_lease_that_is_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It counts the lease as released then, and not as one whose router was lost."""
    channel = open_channel("127.0.0.1:1")
    link = link_over(channel, Ended())
    assert link._stuck() is None
    link.close()
    monkeypatch.setattr(prefill_link, "_CLOSE_PATIENCE_S", 1000.0)
    assert link._stuck() is None
    monkeypatch.setattr(prefill_link, "_CLOSE_PATIENCE_S", 0.0)
    assert link._stuck() == "did not end"
    await channel.close(None)

"""Each message that a worker may send about a request, as the machine's event."""

from typing import Any

from diptych.errors import BlocksExhaustedError
from diptych.rpc.status import to_failure
from diptych.token_logprobs import TokenLogprobs
from diptych.v1 import common_pb2, decode_pb2, prefill_pb2
from router.placement.views import WorkerId
from router.request import actions, events, worker_messages

ABOUT_THE_STREAM = {"heartbeat", "welcome", "step"}  # a step is taken apart by the link


def test_every_prefill_event() -> None:
    first = prefill_pb2.FirstToken(token_id=7, position=5, finish_reason="FINISH_REASON_STOP")
    stop = common_pb2.FINISH_REASON_STOP
    said = {
        "accepted": prefill_pb2.PrefillEvent(
            accepted=prefill_pb2.PrefillAccepted(num_cached_tokens=3)
        ),
        "first_token": prefill_pb2.PrefillEvent(first_token=first),
        "prompt_logprobs": prefill_pb2.PrefillEvent(
            prompt_logprobs=common_pb2.PromptLogprobs(position=4)
        ),
        "pooled": prefill_pb2.PrefillEvent(pooled=prefill_pb2.PooledStates(values=[1])),
        "granted": prefill_pb2.PrefillEvent(granted=prefill_pb2.Granted(grant_id=2)),
    }
    heard = {kind: worker_messages.prefill_event(1, message) for kind, message in said.items()}
    assert heard == {
        "accepted": events.Accepted(1, 3),
        "first_token": events.FirstToken(1, 7, 5, None, stop),
        "prompt_logprobs": events.PromptTold(1, common_pb2.PromptLogprobs(position=4)),
        "pooled": events.PromptTold(1, prefill_pb2.PooledStates(values=[1])),
        "granted": events.Granted(1, 2),
    }
    kinds = {field.name for field in prefill_pb2.PrefillEvent.DESCRIPTOR.oneofs[0].fields}
    # Whatever ends the stream is told by the link, as LeaseEnded.
    assert kinds - heard.keys() == {"heartbeat", "ended"}


def test_a_margin_of_nought_is_one() -> None:
    first = prefill_pb2.FirstToken(token_id=7, position=5, margin=0.0)
    event = worker_messages.prefill_event(1, prefill_pb2.PrefillEvent(first_token=first))
    assert event == events.FirstToken(1, 7, 5, 0.0, 0)


def test_log_probabilities_are_read_of_both_workers() -> None:
    found = TokenLogprobs(-0.5, (7, 8), (-0.5, -1.0))
    first = prefill_pb2.FirstToken(token_id=7, position=5, logprobs=found.to_proto())
    event = worker_messages.prefill_event(1, prefill_pb2.PrefillEvent(first_token=first))
    assert event == events.FirstToken(1, 7, 5, None, 0, found)
    said = decode_pb2.SequenceTokens(
        sequence_id=1, position=6, token_ids=[8, 9], logprobs=[found.to_proto()] * 2
    )
    assert worker_messages.tokens(said).logprobs == (found, found)


def test_every_decode_event() -> None:
    stats = common_pb2.TransferStats(num_bytes=9)
    failed = decode_pb2.PullFailed(
        sequence_id=1, bind_id=2, reason="PULL_FAILURE_SOURCE_LOST", message="gone"
    )
    said = {
        "reserved": decode_pb2.DecodeEvent(
            reserved=decode_pb2.Reserved(sequence_id=1, num_cached_tokens=3)
        ),
        "proven": decode_pb2.DecodeEvent(
            proven=decode_pb2.Proven(sequence_id=1, bind_id=2, stats=stats)
        ),
        "pull_failed": decode_pb2.DecodeEvent(pull_failed=failed),
        "ended": decode_pb2.DecodeEvent(
            ended=decode_pb2.Ended(
                sequence_id=1,
                finish_reason="FINISH_REASON_LENGTH",
                num_preemptions=4,
                num_computed_prompt_tokens=0,
            )
        ),
    }
    heard = {kind: worker_messages.decode_event(message) for kind, message in said.items()}
    assert heard == {
        "reserved": events.Reserved(1, 3),
        "proven": events.Proven(1, 2, stats),
        "pull_failed": events.PullFailed(1, 2, decode_pb2.PULL_FAILURE_SOURCE_LOST, "gone"),
        "ended": events.Ended(1, common_pb2.FINISH_REASON_LENGTH, 4, None, 0),
    }
    kinds = {field.name for field in decode_pb2.DecodeEvent.DESCRIPTOR.oneofs[0].fields}
    assert kinds - heard.keys() == ABOUT_THE_STREAM


def test_a_finish_reason_without_a_name_here_is_not_said() -> None:
    unknown: Any = max(common_pb2.FinishReason.values()) + 1
    first = prefill_pb2.FirstToken(token_id=7, position=5, finish_reason=unknown)
    heard = worker_messages.prefill_event(1, prefill_pb2.PrefillEvent(first_token=first))
    assert heard == events.FirstToken(1, 7, 5, None, 0)
    ended = decode_pb2.Ended(sequence_id=1, finish_reason=unknown)
    heard = worker_messages.decode_event(decode_pb2.DecodeEvent(ended=ended))
    assert heard == events.Ended(1, 0, 0, None)
    known: Any
    for known in common_pb2.FinishReason.values():
        ended = decode_pb2.Ended(sequence_id=1, finish_reason=known)
        heard = worker_messages.decode_event(decode_pb2.DecodeEvent(ended=ended))
        assert heard == events.Ended(1, known, 0, None)


def test_a_failure_keeps_its_class() -> None:
    ended = decode_pb2.Ended(sequence_id=1, failure=to_failure(BlocksExhaustedError("full")))
    event = worker_messages.decode_event(decode_pb2.DecodeEvent(ended=ended))
    assert isinstance(event, events.Ended)
    assert isinstance(event.error, BlocksExhaustedError)


def test_commands_carry_all_that_the_action_says() -> None:
    worker = WorkerId("p1:1", "p1")
    grant = worker_messages.grant(actions.Grant(1, 2, b"t", worker))
    assert (grant.grant_id, grant.ticket, grant.reader_incarnation) == (2, b"t", "p1")
    bind = worker_messages.bind(actions.Bind(1, 2, worker, b"t", 16))
    assert bind == decode_pb2.Bind(
        sequence_id=1,
        bind_id=2,
        source_address="p1:1",
        source_incarnation="p1",
        ticket=b"t",
        first_missing_token=16,
    )
    start = worker_messages.start(actions.Start(1, (5, 6), True, 0.25))
    assert start.emitted_age_s == 0.25
    assert (start.sequence_id, list(start.emitted_token_ids), start.compute_missing) == (
        1,
        [5, 6],
        True,
    )

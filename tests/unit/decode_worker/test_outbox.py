"""What a slow stream still gets: everything, in order, in fewer messages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.outbox import NewToken, Outbox
from diptych.errors import SlowClientError
from diptych.rpc.channel import MAX_MESSAGE_BYTES
from diptych.token_logprobs import TokenLogprobs
from diptych.v1 import common_pb2, decode_pb2


def ended(sequence_id: int) -> decode_pb2.DecodeEvent:
    return decode_pb2.DecodeEvent(ended=decode_pb2.Ended(sequence_id=sequence_id))


def drain(outbox: Outbox) -> list[decode_pb2.DecodeEvent]:
    events = []
    while (event := outbox.take()) is not None:
        events.append(event)
    return events


def test_tokens_of_unsent_steps_are_one_message() -> None:
    outbox = Outbox(8)
    outbox.put_tokens([NewToken(1, 10, 5, 0.5), NewToken(2, 4, 6, None)])
    outbox.put_tokens([NewToken(1, 11, 7, 0.25)])
    outbox.put(ended(1))
    outbox.put_tokens([NewToken(2, 5, 8, None)])
    step, end = drain(outbox)
    first, second = step.step.sequences
    assert (first.sequence_id, first.position) == (1, 10)
    assert list(first.token_ids) == [5, 7]
    assert list(first.margins) == [0.5, 0.25]
    assert (second.sequence_id, second.position) == (2, 4)
    assert list(second.token_ids) == [6, 8]
    assert not second.margins
    assert end == ended(1)


def test_log_probabilities_go_with_their_tokens() -> None:
    outbox = Outbox(8)
    found = [TokenLogprobs(-0.5, (5,), (-0.5,)), TokenLogprobs(-2.0, (), ())]
    outbox.put_tokens([NewToken(1, 10, 5, None, found[0]), NewToken(2, 4, 6, None)])
    outbox.put_tokens([NewToken(1, 11, 7, None, found[1])])
    (step,) = drain(outbox)
    asked, silent = step.step.sequences
    assert [TokenLogprobs.from_proto(one) for one in asked.logprobs] == found
    assert not silent.logprobs


def test_a_sent_step_is_not_touched_again() -> None:
    outbox = Outbox(8)
    outbox.put_tokens([NewToken(1, 10, 5, None)])
    first = outbox.take()
    outbox.put_tokens([NewToken(1, 11, 6, None)])
    second = outbox.take()
    assert first is not None
    assert second is not None
    assert list(first.step.sequences[0].token_ids) == [5]
    assert second.step.sequences[0].position == 11


def test_one_heartbeat_waits_and_is_the_newest() -> None:
    outbox = Outbox(8)
    outbox.put_heartbeat(None)
    outbox.put_heartbeat(common_pb2.EngineProgress(num_steps=3))
    (event,) = drain(outbox)
    assert event.heartbeat.progress.num_steps == 3
    outbox.put_heartbeat(None)
    (event,) = drain(outbox)
    assert event.WhichOneof("event") == "heartbeat"
    assert not event.heartbeat.HasField("progress")


def test_full_is_an_error_but_never_for_tokens() -> None:
    outbox = Outbox(2)
    outbox.put(ended(1))
    outbox.put(ended(2))
    outbox.put_tokens([NewToken(3, 0, 1, None)])
    with pytest.raises(SlowClientError):
        outbox.put(ended(3))


def test_tokens_that_waited_for_long_can_be_sent() -> None:
    """Ones with much beside them: as one message they would end the stream."""
    outbox, largest, num_steps, num_sequences = Outbox(64), 2**32 - 1, 100, 200
    found = TokenLogprobs(-0.5, (largest,) * 100, (-0.5,) * 100)
    for step in range(num_steps):
        outbox.put_tokens(
            NewToken(2**63 + number, 10_000 + step, largest, 0.5, found)
            for number in range(num_sequences)
        )
    outbox.put(ended(2**63))
    *steps, end = drain(outbox)
    sizes = [event.ByteSize() for event in steps]
    assert sum(sizes) > MAX_MESSAGE_BYTES
    assert max(sizes) <= MAX_MESSAGE_BYTES
    assert len(steps) < num_steps / 2, "they are still coalesced"
    drawn = dict[int, int]()
    for event in steps:
        for entry in event.step.sequences:
            assert entry.position == 10_000 + drawn.get(entry.sequence_id, 0)
            drawn[entry.sequence_id] = entry.position + len(entry.token_ids) - 10_000
            assert len(entry.logprobs) == len(entry.margins) == len(entry.token_ids)
    assert drawn == {2**63 + number: num_steps for number in range(num_sequences)}
    assert end == ended(2**63)


@given(st.lists(st.sampled_from(["token 1", "token 2", "end", "take", "beat"]), max_size=40))
def test_order_within_a_sequence(script: list[str]) -> None:
    """Tokens come once, without gaps, before the Ended of their sequence."""
    outbox, sent = Outbox(100), list[decode_pb2.DecodeEvent]()
    current, positions = {1: 1, 2: 2}, dict[int, int]()
    for word in script:
        if word == "take":
            event = outbox.take()
            sent += [event] if event is not None else []
        elif word == "beat":
            outbox.put_heartbeat(None)
        elif word == "end":  # sequence ids are never reused
            outbox.put(ended(current[1]))
            current[1] += 2
        else:
            sequence_id = current[int(word[-1])]
            position = positions.get(sequence_id, 0)
            outbox.put_tokens([NewToken(sequence_id, position, position, None)])
            positions[sequence_id] = position + 1
    sent += drain(outbox)
    seen, over = dict[int, int](), set[int]()
    for event in sent:
        if event.WhichOneof("event") == "ended":
            over.add(event.ended.sequence_id)
        for entry in event.step.sequences:
            assert entry.sequence_id not in over
            assert entry.position == seen.get(entry.sequence_id, 0)
            seen[entry.sequence_id] = entry.position + len(entry.token_ids)
    assert seen == positions

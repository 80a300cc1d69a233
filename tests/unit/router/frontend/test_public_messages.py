"""Events become the messages of the public contract, field by field."""

from dataclasses import fields

import pytest

from diptych.finish_reason import FinishReason
from diptych.token_logprobs import TokenLogprobs
from diptych.v1 import common_pb2, inference_pb2
from router.frontend.public_messages import write_event
from router.generation.answer import (
    ChoiceFinished,
    Delta,
    KVPath,
    Started,
    Summary,
    Timing,
    Transfer,
    Usage,
)

TRANSFER = Transfer(
    transport="nixl",
    num_bytes=1,
    num_tokens=2,
    read_s=3.0,
    exposed_s=4.0,
    total_s=5.0,
    digest_s=6.0,
)
TIMING = Timing(
    queue_s=1.0,
    prefill_s=2.0,
    first_write_s=3.0,
    ttft_s=4.0,
    handoff_gap_s=5.0,
    decode_s=6.0,
    total_s=7.0,
    transfer=TRANSFER,
    kv_path=KVPath.LOCAL,
    num_attempts=8,
    prefill_worker="p:1",
    decode_worker="d:1",
    num_preemptions=9,
    num_computed_prompt_tokens=10,
)
USAGE = Usage(num_prompt_tokens=1, num_output_tokens=2, num_cached_tokens=3, num_resumed_tokens=4)


def test_a_path_has_the_number_and_name_that_it_has_on_the_wire() -> None:
    assert {f"KV_PATH_{path.name}": path.value for path in KVPath} == dict(
        inference_pb2.KVPath.items()
    )


def test_nothing_of_a_summary_is_lost() -> None:
    summary = write_event(Summary(USAGE, TIMING)).summary
    for plain, message in (
        (USAGE, summary.usage),
        (TIMING, summary.timing),
        (TRANSFER, summary.timing.transfer),
    ):
        assert {field.name for field in fields(plain)} == set(message.DESCRIPTOR.fields_by_name)
        for field in fields(plain):
            if field.name != "transfer":
                assert getattr(message, field.name) == getattr(plain, field.name), field.name
    assert not write_event(Summary(USAGE, Timing())).summary.timing.HasField("transfer")


def test_what_ended_a_choice_is_a_string_or_a_token() -> None:
    by_string = write_event(ChoiceFinished(FinishReason.STOP, "###")).choice_finished
    assert (by_string.reason, by_string.stop) == (common_pb2.FINISH_REASON_STOP, "###")
    by_token = write_event(ChoiceFinished(FinishReason.STOP, 7)).choice_finished
    assert (by_token.WhichOneof("matched"), by_token.stop_token_id) == ("stop_token_id", 7)
    by_length = write_event(ChoiceFinished(FinishReason.LENGTH)).choice_finished
    assert by_length.WhichOneof("matched") is None


@pytest.mark.parametrize("reason", FinishReason)
def test_each_reason_to_finish_has_its_name_on_the_wire(reason: FinishReason) -> None:
    written = write_event(ChoiceFinished(reason)).choice_finished.reason
    assert common_pb2.FinishReason.Name(written) == f"FINISH_REASON_{reason.name}"


def test_the_begin_and_a_part_of_an_answer() -> None:
    started = write_event(Started("r", "m", 5, (1, 2))).started
    assert (started.request_id, started.model, started.seed) == ("r", "m", 5)
    assert list(started.prompt_token_ids) == [1, 2]
    response = write_event(Delta("", [], 0, []))
    assert response.WhichOneof("event") == "delta", "also when it is empty"
    delta = write_event(Delta("hi", [3, 4], 6, [0.5, 0.25], choice=1)).delta
    assert (delta.text, list(delta.token_ids), delta.position) == ("hi", [3, 4], 6)
    assert (list(delta.margins), delta.choice) == ([0.5, 0.25], 1)
    assert not delta.logprobs
    found = (TokenLogprobs(-0.5, (3, 9), (-0.5, -1.0)), TokenLogprobs(-2.0, (), ()))
    delta = write_event(Delta("hi", [3, 4], 6, [], found)).delta
    assert tuple(map(TokenLogprobs.from_proto, delta.logprobs)) == found

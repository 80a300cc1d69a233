"""What a decode worker refuses of a Start."""

import dataclasses
import math

import pytest

from decode_worker.worker_limits import WorkerLimits
from diptych.errors import InvalidRequestError
from diptych.v1 import decode_pb2

LIMITS = WorkerLimits(vocab_size=10, max_model_len=8, block_size=4, local_prefill=True)
PULLS_ONLY = dataclasses.replace(LIMITS, local_prefill=False)


def refusal(emitted: list[int]) -> str:
    start = decode_pb2.Start(emitted_token_ids=emitted)
    with pytest.raises(InvalidRequestError) as caught:
        LIMITS.check_start(start, num_tokens=4, proven=True)
    return caught.value.message


def test_what_leaves_room_and_is_known_may_start() -> None:
    start = decode_pb2.Start(emitted_token_ids=[1, 2, 9])
    LIMITS.check_start(start, num_tokens=4, proven=True)


@pytest.mark.parametrize("age_s", [-0.1, math.nan, math.inf])
def test_what_is_no_time_is_named(age_s: float) -> None:
    start = decode_pb2.Start(emitted_token_ids=[1], emitted_age_s=age_s)
    with pytest.raises(InvalidRequestError) as caught:
        LIMITS.check_start(start, num_tokens=4, proven=True)
    assert caught.value.message == f"start.emitted_age_s: {age_s} is no time"


def test_an_unknown_token_is_named() -> None:
    assert refusal([1, 10]) == "start.emitted_token_ids[1]: 10 is not below 10"


def test_tokens_are_counted_before_they_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "decode_worker.worker_limits.check_token_ids", lambda *_, **__: pytest.fail("copied")
    )
    assert refusal([10] * 4) == "start.emitted_token_ids: 8 tokens leave no room in 8"


@pytest.mark.parametrize(
    ("limits", "compute_missing", "says"),
    [
        (LIMITS, False, "start.compute_missing: the sequence is not proven"),
        (PULLS_ONLY, True, "start.compute_missing: local_prefill is off"),
    ],
)
def test_what_is_not_proven_starts_where_it_may_be_computed_and_is_to_be(
    limits: WorkerLimits, *, compute_missing: bool, says: str
) -> None:
    start = decode_pb2.Start(emitted_token_ids=[1], compute_missing=compute_missing)
    with pytest.raises(InvalidRequestError) as caught:
        limits.check_start(start, num_tokens=4, proven=False)
    assert caught.value.message.startswith(says)
    limits.check_start(start, num_tokens=4, proven=True)
    LIMITS.check_start(
        decode_pb2.Start(emitted_token_ids=[1], compute_missing=True), num_tokens=4, proven=False
    )

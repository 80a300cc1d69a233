"""What requests are counted by."""

from diptych.errors import all_reasons
from router.telemetry import OUTCOMES


def test_each_reason_of_an_error_is_an_outcome() -> None:
    assert set(OUTCOMES) == {"ok", "cancelled", *all_reasons()}
    assert {"QUEUE_FULL", "STEP_FAILED"} <= set(OUTCOMES)

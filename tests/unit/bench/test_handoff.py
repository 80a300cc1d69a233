"""The hand-off's benchmark can fail."""

from diptych.v1 import common_pb2, inference_pb2
from tests.bench.handoff import NUM_TOKENS, beyond_limits, summary
from tests.call import Answer


def answer(ttft_s: float, gap_s: float = 0.03, exposed_s: float = 0.01) -> Answer:
    """One whose decode step takes 20 ms."""
    stats = common_pb2.TransferStats(
        num_bytes=1000, read_s=0.01, exposed_s=exposed_s, total_s=0.02, digest_s=0.001
    )
    timing = inference_pb2.Timing(
        ttft_s=ttft_s, handoff_gap_s=gap_s, decode_s=0.02 * (NUM_TOKENS - 2), transfer=stats
    )
    return Answer(summary=inference_pb2.Summary(timing=timing))


def test_a_row_beyond_the_limits_is_named() -> None:
    rows = [
        summary(256, [(answer(0.105), answer(0.1))]),
        summary(512, [(answer(0.111), answer(0.1))]),
        summary(1024, [(answer(0.1, gap_s=0.045), answer(0.1))]),
    ]
    assert [row["within_limits"] for row in rows] == [True, False, False]
    beyond = beyond_limits({"inline": rows[:2], "nixl": rows[2:]})
    assert [line.partition(":")[0] for line in beyond] == [
        "inline, 512 tokens",
        "nixl, 1024 tokens",
    ]

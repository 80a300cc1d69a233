"""Requests as large as a message may be are refused, and nobody beside them notices."""

import asyncio
from pathlib import Path

from diptych.v1 import inference_pb2
from tests.bench import oversized
from tests.notes import Note

NUM_REQUESTS = 24  # the benchmark has 1,000


async def test_oversized_requests_are_refused_beside_others(tmp_path: Path, note: Note) -> None:
    outcome = await asyncio.to_thread(oversized.run, tmp_path, NUM_REQUESTS)
    note(str(outcome))
    assert outcome.num_refused == NUM_REQUESTS
    assert outcome.num_neighbours >= oversized.NUM_NEIGHBOURS
    assert outcome.growth_bytes <= oversized.MAX_GROWTH_BYTES


def test_the_message_is_what_protobuf_would_write() -> None:
    request = inference_pb2.GenerateRequest.FromString(oversized.oversized())
    ids = request.tokens.ids
    assert len(ids) > 16_000_000
    assert (ids[0], ids[-1]) == (5, 5)


def test_the_lag_is_read_from_its_buckets() -> None:
    key = 'diptych_event_loop_lag_seconds_bucket{le="%s"}'
    before = {key % "0.01": 5.0, key % "0.05": 6.0, key % "+Inf": 6.0}
    after = {key % "0.01": 104.0, key % "0.05": 106.0, key % "+Inf": 106.0}
    assert oversized.p99_lag_s(before, after) == 0.01
    assert oversized.p99_lag_s(before, {**after, key % "0.01": 103.0}) == 0.05

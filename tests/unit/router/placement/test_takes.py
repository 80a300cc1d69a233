"""What a worker takes that it did not take is news, and load alone is none. Pure."""

import dataclasses

import pytest

from router.placement.spare import seen_by
from router.placement.takes import decode_takes, is_more
from router.placement.views import DecodeView, Snapshot
from tests.unit.router.placement.test_least_loaded import D1, view_d
from tests.unit.router.placement.test_spare import BATCH, NUM_NEEDED, policy

FREE = view_d(D1, max_num_seqs=32, num_blocks=1000, num_available_blocks=900)


def told(**changes: object) -> DecodeView:
    return dataclasses.replace(FREE, **changes)  # type: ignore[arg-type]


def is_placed(view: DecodeView) -> bool:
    snapshot = Snapshot((), (view,), has_prefill_pool=False)
    return policy().place(BATCH, seen_by(BATCH, snapshot)) is not None


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (told(num_sequences=26), told()),
        (told(num_sequences=24), told(num_sequences=23)),
        (told(num_available_blocks=200), told()),
        (told(num_available_blocks=250), told(num_available_blocks=250 + NUM_NEEDED)),
        (told(num_available_blocks=255), told(num_available_blocks=312)),
        (told(num_available_blocks=200, max_num_seqs=None), told(max_num_seqs=None)),
        (told(num_sequences=26, num_available_blocks=None), told(num_available_blocks=None)),
        (told(num_sequences=26, num_giving_way=20), told(num_sequences=9, num_giving_way=3)),
    ],
)
def test_room_that_a_batch_may_take_is_news(before: DecodeView, now: DecodeView) -> None:
    assert (is_placed(before), is_placed(now)) == (False, True)
    assert is_more(decode_takes(now), decode_takes(before))
    assert not is_more(decode_takes(before), decode_takes(now)), "that it is gone is none"


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (told(num_sequences=23), told(num_sequences=2)),
        (told(num_sequences=30), told(num_sequences=24)),
        (told(num_available_blocks=313), told(num_available_blocks=900)),
        (told(num_available_blocks=100), told(num_available_blocks=250)),
        (told(num_available_blocks=251), told(num_available_blocks=311)),
        (
            told(num_sequences=26, num_available_blocks=200),
            told(num_sequences=26, num_available_blocks=900),
        ),
    ],
)
def test_load_alone_is_none(before: DecodeView, now: DecodeView) -> None:
    assert not is_more(decode_takes(now), decode_takes(before))

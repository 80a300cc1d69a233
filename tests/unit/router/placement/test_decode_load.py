"""What one router knows of the sequences on a decode worker. Pure."""

from router.placement.decode_load import DecodeLoad
from router.placement.promises import NOTHING_PROMISED, Promise

PROMISE = Promise(0.05, 40)


def test_a_prompt_that_is_pulled_after_all_is_not_to_be_computed_there() -> None:
    """It was asked for blocks to compute it; then a prefill worker did that."""
    load = DecodeLoad("r1")
    for sequence_id in (1, 2):
        load.asked(sequence_id, b"somebody", PROMISE, 8000)
    load.reserved(1, 16)
    assert load.num_sent_tokens == 15984
    assert load.bound(1)
    assert not load.bound(1)
    assert not load.bound(7), "one that was to pull from the beginning"
    assert load.num_sent_tokens == 8000
    assert load.num_own == 2


def test_others_sequences_are_those_that_are_not_ours_when_it_tells() -> None:
    """Of ours that it has not answered it may know nothing yet."""
    load = DecodeLoad("r1")
    for sequence_id in (1, 2, 3):
        load.asked(sequence_id, b"somebody", PROMISE, 0)
    load.reserved(1, 0)
    load.answered(2)
    load.told(6, None, 1.0)
    assert (load.num_sequences, load.num_own, load.paced) == (4 + 3, 3, None)
    load.over(3)
    load.over(3)
    assert load.num_sequences == 4 + 2
    load.clear()
    assert (load.num_sequences, load.num_own, load.promised) == (4, 0, NOTHING_PROMISED)
    load.told(1, (), 2.0)
    assert (load.num_sequences, load.paced) == (1, ())

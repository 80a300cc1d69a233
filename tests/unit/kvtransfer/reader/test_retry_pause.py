"""Pauses between tries double up to a limit; those of many readers are spread."""

from collections import Counter
from random import Random

from kvtransfer.config import TransferConfig
from kvtransfer.reader.retry_pause import RetryPause

CONFIG = TransferConfig(reconnect_min_s=1.0, reconnect_max_s=6.0)
NUM_READERS = 1000


def test_pauses_double_up_to_a_limit_and_begin_anew_once_it_was_proven() -> None:
    pause = RetryPause(CONFIG, Random(1))
    for mean_s in (1, 2, 4, 6, 6):
        assert 0.5 * mean_s <= pause.next_s() <= 1.5 * mean_s
    pause.reset()
    assert 0.5 <= pause.next_s() <= 1.5


def test_readers_that_fail_together_come_back_spread_over_the_whole_mean() -> None:
    """Ten parts of the time between half of the mean and one and a half: a tenth in each."""
    pauses = [RetryPause(CONFIG, Random(reader)) for reader in range(NUM_READERS)]
    for mean_s in (1, 2, 4):
        parts = Counter(int(10 * (pause.next_s() / mean_s - 0.5)) for pause in pauses)
        assert parts.keys() == set(range(10))
        assert max(parts.values()) < 1.5 * NUM_READERS / 10

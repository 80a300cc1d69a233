"""Many readers and sources that meet at once: probes take turns, and none is made in vain."""

from collections import Counter

import pytest

from kvtransfer.config import PROBES_AT_ONCE
from tests.probe_storm import BLOCK_BYTES, CONFIG, Storm, storm

JOB_S = 0.01
PROBES_OF_PAIR = 2  # the second one measures


def check_that_nothing_was_in_vain(seen: Storm) -> None:
    """Each pair was probed as often as it has to be, and nobody was refused a probe."""
    num_probes = PROBES_OF_PAIR * len(seen.readers)
    for source in seen.sources:
        assert source.num_fetches == num_probes
        assert source.servicer.counters.num_confirmed == num_probes
        assert source.num_bytes_read == num_probes * CONFIG.probe_blocks * BLOCK_BYTES
        assert not source.servicer.counters.num_refused


def check_that_so_many_were_under_way_at_once_and_no_more(seen: Storm) -> None:
    for processes, num_others in (
        (seen.sources, len(seen.readers)),
        (seen.readers, len(seen.sources)),
    ):
        for process in processes:
            most = CONFIG.probe_blocks * min(PROBES_AT_ONCE, num_others)
            assert process.scratch.most_lent == most
            assert not process.scratch.num_lent


@pytest.mark.parametrize(("num_readers", "num_sources"), [(100, 1), (1, 100), (10, 10)])
def test_all_that_meet_at_once_are_proven_at_the_first_try(
    num_readers: int, num_sources: int
) -> None:
    seen = storm(num_readers, num_sources, job_s=JOB_S)
    check_that_nothing_was_in_vain(seen)
    check_that_so_many_were_under_way_at_once_and_no_more(seen)
    for source in seen.sources:
        assert len(source.asked_at) == num_readers
    for reader in seen.readers:
        assert not reader.pairs.counters.num_pairs_failed


def test_readers_of_a_source_that_is_away_come_back_at_different_moments() -> None:
    seen = storm(100, 1, job_s=JOB_S, up_at=10.0)
    check_that_nothing_was_in_vain(seen)
    (source,) = seen.sources
    # Pauses of at least 0.05, 0.1, 0.2, 0.4, 0.8, 1.6 and then 2.5 s.
    assert len(source.asked_at) <= 11 * len(seen.readers)
    at_first, *later = Counter(int(asked_at / 0.01) for asked_at in source.asked_at).items()
    assert at_first == (0, 100)
    assert max(num for _, num in later) < 25

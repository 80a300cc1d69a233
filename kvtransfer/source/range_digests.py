"""Digests of what a source announces, taken on the transfer thread."""

import logging
import secrets
import time
from functools import partial
from typing import NamedTuple

from kvtransfer.digest import Coverage, coverages
from kvtransfer.endpoint import TransferEndpoint
from kvtransfer.memory import BlockMemory
from kvtransfer.source.fetch_session import SourceCounters
from kvtransfer.source.lease_record import Lease
from kvtransfer.source.lease_table import LeaseTable

logger = logging.getLogger(__name__)


class _Taken(NamedTuple):
    digests: tuple[bytes, ...]  # of each block
    digest_s: float  # how long that took


class RangeDigests:
    """Gives each range that a lease table announces its digests. Event loop only."""

    def __init__(
        self, endpoint: TransferEndpoint, leases: LeaseTable, counters: SourceCounters
    ) -> None:
        self._endpoint = endpoint
        self._leases = leases
        self._counters = counters

    def take(self, lease: Lease, index: int) -> None:
        """Have those of ``lease.ranges[index]`` computed, off the loop."""
        level = self._endpoint.layout.digest_level
        if level == "off":
            self._leases.add_digests(lease, index, ())
            return
        block_ids = lease.ranges[index].block_ids
        first = lease.ranges[index].first_token // self._leases.block_size
        num_bytes = [
            self._endpoint.needs.num_bytes_of(place, lease.num_tokens)
            for place in range(first, first + len(block_ids))
        ]
        seed = 1 + secrets.randbelow(2**64 - 1) if level == "sampled" else 0

        def done(taken: _Taken | None, error: Exception | None) -> None:
            if taken is None:  # without digests no reader can be served
                logger.error("digest failed", exc_info=error)
                self._leases.close(lease.lease_id)
                return
            self._counters.digest_s += taken.digest_s
            self._leases.add_digests(lease, index, taken.digests, seed)

        wanted = coverages(num_bytes, seed, first)
        self._endpoint.thread.submit(
            partial(_taken, self._endpoint.memory, block_ids, wanted), done
        )


def _taken(memory: BlockMemory, block_ids: tuple[int, ...], wanted: tuple[Coverage, ...]) -> _Taken:
    """On the transfer thread."""
    started_s = time.monotonic()
    digests = memory.digests(block_ids, wanted)
    return _Taken(digests, time.monotonic() - started_s)

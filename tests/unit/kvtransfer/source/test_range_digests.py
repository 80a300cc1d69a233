"""What becomes of a lease whose digests are taken, or cannot be."""

from collections.abc import AsyncIterator, Callable

import pytest

from diptych.errors import LeaseExpiredError
from diptych.v1 import common_pb2
from kvtransfer.config import TransferConfig
from kvtransfer.endpoint import TransferEndpoint
from kvtransfer.memory import HostMemory
from kvtransfer.source.fetch_session import SourceCounters
from kvtransfer.source.lease_table import LeaseTable
from kvtransfer.source.range_digests import RangeDigests

BLOCK_SIZE, BLOCK_BYTES, NUM_BLOCKS = 4, 16, 4
TICKET = b"t" * 16


@pytest.fixture(params=["full"])
async def endpoint(request: pytest.FixtureRequest) -> AsyncIterator[TransferEndpoint]:
    config = TransferConfig(transports=("inline",), digest_level=request.param)
    layout = common_pb2.KVLayout(
        digest_level=config.digest_level, block_size=BLOCK_SIZE, block_bytes=BLOCK_BYTES
    )
    opened = await TransferEndpoint.open(
        config,
        incarnation="source",
        layout=layout,
        memory=HostMemory(bytearray(NUM_BLOCKS * BLOCK_BYTES), BLOCK_BYTES),
    )
    yield opened
    await opened.close()


async def announced(
    endpoint: TransferEndpoint, block_ids: list[int], watcher: Callable[[], None]
) -> LeaseTable:
    """A lease on these blocks, granted and announced whole; its digests were taken, or not."""
    leases = LeaseTable(BLOCK_SIZE, lambda block_id: 0)
    leases.observe(RangeDigests(endpoint, leases, SourceCounters()).take)
    num_tokens = len(block_ids) * BLOCK_SIZE
    leases.open("lease", block_ids, num_tokens, b"p" * 16)
    leases.grant("lease", TICKET, "reader")
    (lease,) = leases.open_leases
    lease.watchers.add(watcher)
    leases.announce("lease", num_tokens)
    await endpoint.thread.call(lambda: None)  # what was submitted before is done by then
    return leases


async def test_a_range_that_was_announced_gets_a_digest_of_each_block(
    endpoint: TransferEndpoint,
) -> None:
    told: list[str] = []
    leases = await announced(endpoint, [0, 1], lambda: told.append("changed"))
    (ready,) = leases.ready_ranges(leases.admit(TICKET, "reader", 0), 0)
    assert len(ready.digests or ()) == 2
    assert told == ["changed"]


@pytest.mark.parametrize(
    ("endpoint", "num_digests", "is_sampled"),
    [("full", 2, False), ("sampled", 2, True), ("off", 0, False)],
    indirect=["endpoint"],
)
async def test_what_is_read_of_blocks_is_what_the_cluster_agreed_on(
    endpoint: TransferEndpoint, num_digests: int, is_sampled: bool
) -> None:
    leases = await announced(endpoint, [0, 1], lambda: None)
    (ready,) = leases.ready_ranges(leases.admit(TICKET, "reader", 0), 0)
    assert len(ready.digests or ()) == num_digests
    assert bool(ready.sample_seed) == is_sampled


async def test_a_lease_whose_digests_cannot_be_taken_ends_and_its_reader_hears_it(
    endpoint: TransferEndpoint,
) -> None:
    """Else its reader would wait for ever: without digests it is not served."""
    told: list[str] = []
    leases = await announced(endpoint, [0, NUM_BLOCKS], lambda: told.append("changed"))
    assert leases.num_leases == leases.num_grants == 0
    assert told == ["changed"]
    with pytest.raises(LeaseExpiredError):
        leases.admit(TICKET, "reader", 0)

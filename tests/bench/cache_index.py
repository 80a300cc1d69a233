"""A million random events in the lives of prefix caches that two routers follow, and its cost.

    .venv/bin/python -m tests.bench.cache_index --events 1000000

Ends with an error at the first difference between a router's index and a pool. Then says what
a followed block takes: seconds of a router to hear of it, and bytes to know it.
"""

import argparse
import json
import sys
import time
import tracemalloc

from diptych.block_hash import block_keys
from diptych.cache_change import CacheChange
from diptych.cache_log import CacheLog
from diptych.v1 import cache_pb2
from router.placement.cache_index import CacheIndex
from tests.cache_events import CacheEvents

_CHECK_EVERY = 5000  # events
_NUM_BLOCKS = 65_536


def follow(num_events: int, seed: int) -> dict[str, int]:
    """What happened, each kind so often. Raises AssertionError: an index is not what a pool is."""
    events = CacheEvents(seed)
    for first in range(0, num_events, _CHECK_EVERY):
        events.run(min(_CHECK_EVERY, num_events - first))
        events.check()
    return dict(events.counts)


def cost() -> dict[str, float]:
    """Of one worker's full cache, told as a whole; decoding the messages is in it."""
    keys = dict.fromkeys(block_keys(range(_NUM_BLOCKS * 16), 16))
    log = CacheLog(keys.keys(), _NUM_BLOCKS)
    for key in keys:
        log.entered(key)
    sent = [change.to_proto("w").SerializeToString() for change in log.since(None)]
    tracemalloc.start()
    index = CacheIndex(_NUM_BLOCKS)
    before = tracemalloc.get_traced_memory()[0]
    _hear(index, sent)
    num_bytes = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    began_s = time.process_time()
    _hear(index, sent)
    taken_s = time.process_time() - began_s
    return {
        "message_bytes_per_block": sum(map(len, sent)) / _NUM_BLOCKS,
        "bytes_per_block": num_bytes / _NUM_BLOCKS,
        "us_per_block": 1e6 * taken_s / _NUM_BLOCKS,
    }


def _hear(index: CacheIndex, sent: list[bytes]) -> None:
    for message in sent:
        change = CacheChange.from_proto(cache_pb2.CacheChange.FromString(message))
        assert index.told("w", change)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    result = {"seed": options.seed, "events": follow(options.events, options.seed), **cost()}
    json.dump(result, sys.stdout, indent=2)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()

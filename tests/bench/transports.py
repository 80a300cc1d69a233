"""How fast a pull is over each transport, in one run.

``python -m tests.bench.transports [nixl ucxx inline]``: one JSON list; nothing else
should run. For each transport and block size, a source in another process leases 32
blocks, and a reader here pulls them again and again; the transports alternate. A pull
is all of it: gRPC, reads, digests at both ends, confirmation.
"""

import argparse
import asyncio
import json
import statistics
import sys
from contextlib import AsyncExitStack
from typing import Any

from diptych.v1 import common_pb2
from tests.integration.source_process import SourceProcess, connect, source_process
from tests.integration.transfer_rig import Reader, config, open_reader
from tests.integration.transfer_source import LEASED

BLOCK_BYTES = {"64 KiB": 64 * 1024, "1 MiB": 2**20}
NUM_ROUNDS = 15


async def measure(transports: list[str], block_bytes: int) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        pairs: dict[str, tuple[Reader, SourceProcess]] = {}
        for name in transports:
            source = await stack.enter_async_context(
                source_process(name, incarnation=name, is_forked=False, block_bytes=block_bytes)
            )
            reader = await stack.enter_async_context(
                open_reader(config(name), block_bytes=block_bytes)
            )
            await connect(reader, source)
            source.announce_rest()
            pairs[name] = reader, source
        stats: dict[str, list[common_pb2.TransferStats]] = {name: [] for name in transports}
        for number in range(NUM_ROUNDS + 1):
            for name, (reader, source) in pairs.items():
                result = await reader.pairs.open_pull(source.request).run()
                if number:  # the first round warms up
                    stats[name].append(result.stats)
        return {name: described(each) for name, each in stats.items()}


def described(stats: list[common_pb2.TransferStats]) -> dict[str, float]:
    median = statistics.median
    return {
        "pull_ms": round(median(1e3 * each.total_s for each in stats), 2),
        "pull_gb_per_s": round(median(each.num_bytes / each.total_s / 1e9 for each in stats), 2),
        "read_gb_per_s": round(median(each.num_bytes / each.read_s / 1e9 for each in stats), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("transports", nargs="*", default=["nixl", "ucxx", "inline"])
    transports = parser.parse_args().transports
    rows = [
        {"blocks": f"{len(LEASED)} of {name}", **asyncio.run(measure(transports, num_bytes))}
        for name, num_bytes in BLOCK_BYTES.items()
    ]
    json.dump(rows, sys.stdout, indent=1)


if __name__ == "__main__":
    main()

"""A source in a process of its own, for tests that kill or stop it.

Writes JSON to a file: address, ticket, a digest of what it leased; announces half of it, and
the rest when it gets SIGUSR1.
"""

import argparse
import asyncio
import json
import signal
import sys
from pathlib import Path

import xxhash

from tests.integration.transfer_rig import BLOCK_SIZE, config, open_source

LEASED = list(range(32))


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--transport", required=True)
    parser.add_argument("--incarnation", default="source")
    parser.add_argument("--address", default="127.0.0.1:0")
    parser.add_argument("--block-bytes", type=int, default=4096)
    parser.add_argument("--num-blocks", type=int, default=64)
    parser.add_argument("--settings", default="{}")
    parser.add_argument("--described", type=Path, required=True)
    parser.add_argument("--stop-with-stdin", action="store_true")
    arguments = parser.parse_args()
    transfer = config(arguments.transport, **json.loads(arguments.settings))
    async with open_source(
        transfer,
        incarnation=arguments.incarnation,
        address=arguments.address,
        block_bytes=arguments.block_bytes,
        num_blocks=arguments.num_blocks,
    ) as source:
        content = source.fill(LEASED)
        num_tokens = len(LEASED) * BLOCK_SIZE
        ticket = source.lease("lease", LEASED, num_tokens, "reader")
        source.leases.announce("lease", num_tokens // 2)
        described = {
            "address": source.address,
            "ticket": ticket.hex(),
            "digest": xxhash.xxh3_128_hexdigest(content),
        }
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, source.leases.announce, "lease", num_tokens)
        unfinished = arguments.described.with_suffix(".tmp")
        unfinished.write_text(json.dumps(described))
        unfinished.rename(arguments.described)
        if arguments.stop_with_stdin:
            await loop.run_in_executor(None, sys.stdin.read)
        else:
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())

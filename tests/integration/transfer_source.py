"""A source in a process of its own, for tests that kill or stop it.

Prints one JSON line: address, ticket, a digest of what it leased; announces half of
it, and the rest when it gets a line on stdin.
"""

import argparse
import asyncio
import json
import sys

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
        sys.stdout.write(json.dumps(described) + "\n")
        sys.stdout.flush()
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(None, sys.stdin.readline):
            source.leases.announce("lease", num_tokens)


if __name__ == "__main__":
    asyncio.run(main())

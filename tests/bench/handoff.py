"""What the hand-off costs: bytes, GB/s, exposed share; TTFT and gap against one process.

    .venv/bin/python -m tests.bench.handoff --model demo --out handoff.json

For each transport, a cluster of one prefill and one decode worker runs beside a
colocated one (a decode worker alone), every engine on one thread, so that the two
differ in the hand-off alone; nothing else should run. Pairs of the same
fresh prompt go to the two in alternating order; figures are medians over the
pairs. ``ttft_difference_ms`` is disaggregated less one process. The limits:
TTFT difference <= 10 ms; hand-off gap <= exposed transfer + one step + 10 ms. A row beyond them
is named, and the exit code is 1. (A long prompt over ``inline`` is beyond them: its bytes are
copied through gRPC on the cores that compute.)
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import grpc

from diptych.rpc.channel import open_channel
from tests.bench.environment import environment
from tests.call import Answer, generate, token_request
from tests.cluster import Cluster, running_cluster

LENGTHS = [256, 512, 1024, 2048]
NUM_TOKENS = 8
LIMIT_MS = 10.0


async def measure(
    disaggregated: Cluster, colocated: Cluster, lengths: list[int], num_pairs: int, vocab: int
) -> list[dict[str, object]]:
    """One row of figures per prompt length."""
    await disaggregated.wait_ready()
    await colocated.wait_ready(num_pairs=0)
    rng, rows = random.Random(5), []
    async with (
        open_channel(disaggregated.router.address) as apart,
        open_channel(colocated.router.address) as together,
    ):
        for length in lengths:
            pairs = []
            for number in range(num_pairs + 1):
                prompt = [rng.randrange(100, vocab) for _ in range(length)]
                channels = [apart, together] if number % 2 else [together, apart]
                first = await ask(channels[0], prompt)
                second = await ask(channels[1], prompt)
                if number:  # the first pair warms up
                    pairs.append((first, second) if number % 2 else (second, first))
            rows.append(summary(length, pairs))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)  # noqa: T201
    return rows


async def ask(channel: grpc.aio.Channel, prompt: list[int]) -> Answer:
    answer = await generate(channel, token_request(prompt, max_tokens=NUM_TOKENS))
    if answer.error is not None:
        raise answer.error
    return answer


def summary(length: int, pairs: list[tuple[Answer, Answer]]) -> dict[str, object]:
    """Medians over (disaggregated, one process) pairs."""
    median = statistics.median
    apart = [a.timing for a, _ in pairs]
    together = [b.timing for _, b in pairs]
    steps_ms = [1e3 * t.decode_s / (NUM_TOKENS - 2) for t in apart]
    excess_ms = [
        1e3 * (t.handoff_gap_s - t.transfer.exposed_s) - step
        for t, step in zip(apart, steps_ms, strict=True)
    ]
    difference_ms = [1e3 * (a.ttft_s - b.ttft_s) for a, b in zip(apart, together, strict=True)]
    return {
        "prompt_tokens": length,
        "num_pairs": len(pairs),
        "kv_bytes": apart[0].transfer.num_bytes,
        "read_gb_per_s": median(
            t.transfer.num_bytes / t.transfer.read_s / 1e9 for t in apart if t.transfer.read_s
        ),
        "exposed_ms": median(1e3 * t.transfer.exposed_s for t in apart),
        "exposed_ratio": median(t.transfer.exposed_s / t.transfer.total_s for t in apart),
        "digest_ms": median(1e3 * t.transfer.digest_s for t in apart),
        "ttft_ms": median(1e3 * t.ttft_s for t in apart),
        "ttft_one_process_ms": median(1e3 * t.ttft_s for t in together),
        "ttft_difference_ms": median(difference_ms),
        "handoff_gap_ms": median(1e3 * t.handoff_gap_s for t in apart),
        "step_ms": median(steps_ms),
        "gap_less_exposed_and_step_ms": median(excess_ms),
        "within_limits": median(difference_ms) <= LIMIT_MS and median(excess_ms) <= LIMIT_MS,
    }


def beyond_limits(result: Mapping[str, Sequence[Mapping[str, object]]]) -> list[str]:
    """One line for each row, by transport, that is not within the limits."""
    return [
        f"{transport}, {row['prompt_tokens']} tokens: TTFT {row['ttft_difference_ms']:.1f} ms, "
        f"gap less exposed transfer and step {row['gap_less_exposed_and_step_ms']:.1f} ms; "
        f"allowed: {LIMIT_MS:.0f} ms"
        for transport, rows in result.items()
        for row in rows
        if not row["within_limits"]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--transport", action="append", help="default: nixl and inline")
    parser.add_argument("--pairs", type=int, default=20, help="pairs per length")
    parser.add_argument("--length", type=int, action="append", help="prompt tokens")
    parser.add_argument("--vocab", type=int, default=49_000, help="token ids below this")
    parser.add_argument("--out", type=Path, default=Path("bench-handoff.json"))
    options = parser.parse_args()
    lengths = options.length or LENGTHS
    flags = {
        "kv-cache-memory": "512MiB",
        "max-model-len": str(max(lengths) + 64),
        "num-threads": "1",
    }
    rows: dict[str, list[dict[str, object]]] = {}
    for transport in options.transport or ["nixl", "inline"]:
        with (
            tempfile.TemporaryDirectory() as work,
            running_cluster(
                Path(work) / "apart",
                options.model,
                worker_flags={**flags, "transfer.transports": transport},
                router_flags={"local-prefill-below-tokens": "0"},
            ) as disaggregated,
            running_cluster(
                Path(work) / "together", options.model, num_prefill=0, worker_flags=flags
            ) as colocated,
        ):
            rows[transport] = asyncio.run(
                measure(disaggregated, colocated, lengths, options.pairs, options.vocab)
            )
    result = {"environment": environment(), "model": options.model, **rows}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    beyond = beyond_limits(rows)
    for line in beyond:
        print(line, file=sys.stderr)  # noqa: T201
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())

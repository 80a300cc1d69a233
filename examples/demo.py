"""Three answers from a router, a prefill worker and a decode worker, each its own process.

    make demo

Shows for each where its time went: the prompt is computed on one worker, its KV
blocks are read by the other, which continues. Fails when an answer came any
other way, or is none.
"""

import asyncio
import sys
import time

from diptych.cli.breakdown import breakdown
from diptych.cli.cluster_child import ChildFailedError
from diptych.cli.generate import stream
from diptych.cli.local_cluster import ClusterPlan, LocalCluster, run_cluster
from diptych.cli.model import fetch_with_progress
from diptych.cli.up import cancel_on_signals, say
from diptych.client import ChatMessage, SamplingOptions, build_request
from diptych.errors import ConfigurationError, DiptychError
from diptych.v1 import inference_pb2

# What to ask, and a word that the answer must have.
QUESTIONS = (
    ("What is the capital of France?", "Paris"),
    ("Why is the sky blue? Answer in one sentence.", ""),
    ("Write two lines about a diptych, a painting on two panels joined by a hinge.", ""),
)
MAX_TOKENS = 48

PLAN = ClusterPlan(
    model="demo",
    common_args=("--log-level", "warning"),
    # Prompts this short would otherwise be computed where they are decoded.
    router_args=("--local-prefill-below-tokens", "0"),
)


def main() -> int:
    """Run the demo; the exit code."""
    try:
        fetch_with_progress(PLAN.model)
        return asyncio.run(demo())
    except (ConfigurationError, ChildFailedError, DiptychError) as error:
        print(f"demo: {error}", file=sys.stderr)  # noqa: T201
        return 1


async def demo() -> int:
    """Start the cluster, ask, end it."""
    stopped, began = cancel_on_signals(), time.monotonic()

    async def use(cluster: LocalCluster) -> int:
        await cluster.ready()
        say("demo", f"ready after {time.monotonic() - began:.1f} s")
        return sum([await ask(cluster.address, *question) for question in QUESTIONS])

    try:
        num_failed = await run_cluster(PLAN, say, use)
    except asyncio.CancelledError:
        if not stopped.is_set():
            raise
        return 130
    return 1 if num_failed else 0


async def ask(address: str, question: str, word: str) -> int:
    """Stream one answer and show its breakdown; 1 if it is not what was to be shown, else 0."""
    request = build_request(
        messages=[ChatMessage("user", question)],
        options=SamplingOptions(temperature=0, max_tokens=MAX_TOKENS),
    )
    parts: list[str] = []

    def write(text: str) -> None:
        parts.append(text)
        show(text)

    show(f"\n> {question}\n\n")
    last = await stream(address, request, write, timeout_s=120)
    assert last.usage is not None
    assert last.timing is not None
    lines = breakdown(last.usage, last.timing)
    show("\n\n" + "\n".join(f"    {line}" for line in lines) + "\n")
    found = problem("".join(parts), word, last.timing)
    if found:
        show(f"    {found}\n")
    return 1 if found else 0


def problem(text: str, word: str, timing: inference_pb2.Timing) -> str:
    """What is wrong with an answer; empty if nothing is."""
    if not text.strip():
        return "expected a text"
    if word not in text:
        return f"expected {word!r} in the answer"
    if timing.kv_path != inference_pb2.KV_PATH_DISAGGREGATED or not timing.transfer.num_bytes:
        return "expected a hand-off from the prefill to the decode worker"
    return ""


def show(text: str) -> None:
    """Print at once."""
    print(text, end="", flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())

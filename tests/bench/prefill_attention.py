"""Prefill attention of one layer: our kernel beside torch's, and the rate of a matrix product.

``python -m tests.bench.prefill_attention``: for each chunk x context and window the rate
of both on gathered float32 context, in turn, in GFLOP/s of what the mask leaves.
"""

import argparse
import statistics
import time

import torch

from diptych.engine.backends.cpu.prefill_attention import TiledAttention
from diptych.engine.backends.torch.prefill_attention import SDPA, ChunkView, ContextAttention
from diptych.engine.inputs import PrefillChunk
from diptych.engine.model.config import ModelConfig
from tests.bench.ceilings import measure
from tests.golden.models import gemma3_folder, smollm2_folder

CHUNKS = ["512x0", "512x512", "512x1536", "48x2000"]


class Case:
    """One chunk of a random prompt after its context."""

    def __init__(
        self, config: ModelConfig, num_tokens: int, start: int, window: int | None
    ) -> None:
        first = 0 if window is None else max(0, start - window + 1)
        chunk = PrefillChunk(0, num_tokens, start, torch.zeros(0, dtype=torch.int64))
        self._view = ChunkView(chunk, window, first, None, slice(0))
        self._q = torch.randn(num_tokens, config.num_heads, config.head_dim)
        num_keys = start + num_tokens - first
        self._context = torch.randn(2, config.num_kv_heads, num_keys, config.head_dim)
        self._out = torch.empty_like(self._q)
        seen = range(start + 1, start + num_tokens + 1)
        num_seen = sum(seen) if window is None else sum(min(n, window) for n in seen)
        self.num_flops = 4 * config.num_heads * config.head_dim * num_seen

    def run_s(self, attend: ContextAttention) -> float:
        begin = time.perf_counter()
        attend(self._q, self._context, self._view, self._out)
        return time.perf_counter() - begin


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=["demo", "gemma"], action="append", help="default: both")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--chunk", action="append", help="TOKENSxCONTEXT, by default 4 of them")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    best = measure(args.threads, "float32").flops_per_s["float32"]
    print(f"a matrix product: {best / 1e9:.0f} GFLOP/s on {args.threads} threads")  # noqa: T201
    print("model, tokens x context, window, torch, kernel, kernel / product")  # noqa: T201
    for model in args.model or ["demo", "gemma"]:
        config = ModelConfig.from_folder(smollm2_folder() if model == "demo" else gemma3_folder())
        kinds: list[ContextAttention] = [SDPA(config), TiledAttention(config)]
        for window in dict.fromkeys(layer.sliding_window for layer in config.layers):
            for name in args.chunk or CHUNKS:
                num_tokens, start = map(int, name.split("x"))
                case = Case(config, num_tokens, start, window)
                turns = [[case.run_s(kind) for kind in kinds] for _ in range(args.repeats + 1)]
                theirs, ours = (
                    case.num_flops / statistics.median(times)
                    for times in zip(*turns[1:], strict=True)
                )
                print(  # noqa: T201
                    f"{model}, {name}, {window or 'none'}, {theirs / 1e9:.0f}, {ours / 1e9:.0f}, "
                    f"{ours / best:.2f}"
                )


if __name__ == "__main__":
    main()

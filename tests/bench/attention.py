"""Decode attention alone, in every type of the cache, beside the rate of reading memory.

``python -m tests.bench.attention``: for each batch x context, number of threads and
type the time of one step's attention over all layers, and the cache's bytes per
second as a part of what reading memory gives in the same run. Types take turns.
"""

import argparse
import statistics
import time

import torch

from diptych.engine.backends.cpu.paged_decode import PagedDecode
from diptych.engine.inputs import DecodeBatch
from diptych.engine.kv.cache import KV_DTYPES, KVCache
from diptych.engine.model.config import ModelConfig
from tests.bench.ceilings import read_rate
from tests.golden.models import gemma3_folder, smollm2_folder

BLOCK_SIZE = 16


class Case:
    """One batch on scattered blocks of one type."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, rows: int, context: int) -> None:
        columns = -(-context // BLOCK_SIZE)
        self._config = config
        self._cache = KVCache(config, rows * columns, BLOCK_SIZE, dtype)
        self._cache.tensor.view(-1).view(torch.uint8).fill_(60)  # 0.01 or so in each type
        order = torch.randperm(rows * columns, generator=torch.Generator().manual_seed(1))
        self._batch = DecodeBatch(order.view(rows, columns), torch.full((rows,), context))
        self._q = torch.randn(rows, config.num_heads, config.head_dim)
        self._out = torch.empty_like(self._q)
        windows = [layer.sliding_window or context for layer in config.layers]
        token_bytes = self._cache.block_bytes / BLOCK_SIZE / config.num_layers
        self.num_bytes = sum(rows * min(w, context) * token_bytes for w in windows)

    def step_s(self) -> float:
        begin = time.perf_counter()
        attend = PagedDecode(self._config, self._cache, self._batch)
        for layer in range(self._config.num_layers):
            attend(layer, self._q, self._out)
        return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=["demo", "gemma"], default="demo")
    parser.add_argument("--threads", type=int, action="append", help="default: 1 and 2")
    parser.add_argument("--batch", action="append", help="ROWSxCONTEXT, by default 3 of them")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    folder = smollm2_folder() if args.model == "demo" else gemma3_folder()
    config = ModelConfig.from_folder(folder)
    print("batch x context, threads, type, ms, GB/s, part of the memory's rate")  # noqa: T201
    for batch in args.batch or ["1x512", "1x2048", "16x512"]:
        rows, context = map(int, batch.split("x"))
        cases = {name: Case(config, dtype, rows, context) for name, dtype in KV_DTYPES.items()}
        for num_threads in args.threads or [1, 2]:
            torch.set_num_threads(num_threads)
            memory = read_rate(2**26, 0.2)
            turns = [[c.step_s() for c in cases.values()] for _ in range(args.repeats + 1)]
            memory = max(memory, read_rate(2**26, 0.2))
            for (name, case), times in zip(
                cases.items(), zip(*turns[1:], strict=True), strict=True
            ):
                step_s = statistics.median(times)
                rate = case.num_bytes / step_s
                print(  # noqa: T201
                    f"{batch}, {num_threads}, {name}, {1e3 * step_s:.2f}, "
                    f"{rate / 1e9:.1f}, {rate / memory:.2f}"
                )


if __name__ == "__main__":
    main()

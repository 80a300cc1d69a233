"""OpenVINO GenAI on the scenarios of peers.py, in-process; run by its own environment.

    $PEERS/ov/bin/python tests/bench/openvino_peer.py $PEERS/gemma-ov

Needs openvino-genai and nothing of Diptych. Float32 with two threads; one JSON line per
round and scenario.
"""

import argparse
import importlib
import json
import random
import statistics
import sys
import time
from typing import Any

SCENARIOS = {
    "1 at a time": (1, 512, 128),
    "8 at a time": (8, 512, 128),
    "16 at a time": (16, 512, 128),
    "long prompt": (1, 2048, 1),
}


def measure(genai: Any, openvino: Any, pipe: Any, name: str, rng: random.Random) -> dict[str, Any]:
    """Ask for all answers at once and step until they are there."""
    num_streams, num_prompt_tokens, num_output_tokens = SCENARIOS[name]
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = num_output_tokens, True, False
    prompts = [
        [rng.randrange(1000, 20_000) for _ in range(num_prompt_tokens)] for _ in range(num_streams)
    ]
    begin = time.monotonic()
    handles = [
        pipe.add_request(number, openvino.Tensor([prompt]), config)
        for number, prompt in enumerate(prompts)
    ]
    first_s: dict[int, float] = {}
    num_tokens = [0] * num_streams
    while pipe.has_non_finished_requests():
        pipe.step()
        for number, handle in enumerate(handles):
            if not handle.can_read():
                continue
            first_s.setdefault(number, time.monotonic() - begin)
            for output in handle.read().values():
                num_tokens[number] += len(output.generated_ids)
    wall_s, ttft_s = time.monotonic() - begin, statistics.median(first_s.values())
    return {
        "scenario": name,
        "ttft_s": ttft_s,
        "output_tokens_per_s": sum(num_tokens) / wall_s,
        "prompt_tokens_per_s": num_prompt_tokens / ttft_s,
        "num_output_tokens": num_tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="OpenVINO GenAI, in-process")
    parser.add_argument("folder", help="what optimum-cli exported")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    # Not installed where Diptych is developed.
    genai: Any = importlib.import_module("openvino_genai")
    openvino: Any = importlib.import_module("openvino")
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens, scheduler.cache_size = 512, 2
    pipe = genai.ContinuousBatchingPipeline(
        options.folder,
        scheduler,
        "CPU",
        {
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
            "INFERENCE_NUM_THREADS": options.threads,
        },
    )
    rng = random.Random(5)
    for number in range(options.rounds):
        for name in SCENARIOS:
            row = {"round": number, **measure(genai, openvino, pipe, name, rng)}
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()

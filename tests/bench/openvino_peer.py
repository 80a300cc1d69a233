"""OpenVINO GenAI behind the completions API, in its own process; run by its own environment.

    $PEERS/ov/bin/python tests/bench/openvino_peer.py $PEERS/gemma-ov --port 8105

With ``--measure`` instead of ``--port``: what it does in this process, without the server.
Prints output tokens/s of 1, 8 and 16 prompts of 512 tokens at a time, 128 out, and prompt
tokens/s of one of 2,048: medians of three rounds.

Needs openvino-genai and nothing of Diptych. Float32, two threads, keys and values in
float32, continuous batching in steps of 1,024 tokens, like the others. It answers what
peers.py asks, no more: streams, greedy, the end-of-sequence token ignored.
"""

import argparse
import collections
import importlib
import itertools
import json
import queue
import random
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import numpy as np


class Request(NamedTuple):
    """One prompt; the numbers of tokens that each step gave go to ``steps``."""

    prompt: Any  # tensor of token ids, [1, num_tokens]
    max_tokens: int
    steps: "queue.SimpleQueue[int]"


class Scenario(NamedTuple):
    """As peers.py has them."""

    num_streams: int
    num_prompt_tokens: int
    max_tokens: int


SCENARIOS = (
    Scenario(1, 512, 128), Scenario(8, 512, 128), Scenario(16, 512, 128), Scenario(1, 2048, 1),
)  # fmt: skip
NUM_ROUNDS = 3
WORDS = range(1000, 20_000)  # token ids


class Engine:
    """The pipeline. ``run`` owns it, on one thread; others submit."""

    def __init__(self, folder: str, num_threads: int) -> None:
        # Not installed where Diptych is developed.
        self._genai: Any = importlib.import_module("openvino_genai")
        scheduler = self._genai.SchedulerConfig()
        scheduler.max_num_batched_tokens, scheduler.cache_size = 1024, 2
        self._pipe = self._genai.ContinuousBatchingPipeline(
            folder,
            scheduler,
            "CPU",
            {
                "INFERENCE_PRECISION_HINT": "f32",
                "KV_CACHE_PRECISION": "f32",
                "INFERENCE_NUM_THREADS": num_threads,
            },
        )
        self._tokenizer = self._genai.Tokenizer(folder)
        self._submitted: queue.SimpleQueue[Request] = queue.SimpleQueue()

    def submit(self, text: str, max_tokens: int) -> tuple[int, Iterator[int]]:
        """Number of prompt tokens, and how many tokens each step gives until all are there."""
        prompt = self._tokenizer.encode(text).input_ids
        return prompt.shape[1], self._ask(prompt, max_tokens)

    def submit_ids(self, token_ids: Sequence[int], max_tokens: int) -> Iterator[int]:
        """How many tokens each step gives until all are there."""
        openvino: Any = importlib.import_module("openvino")
        return self._ask(openvino.Tensor(np.array([token_ids], np.int64)), max_tokens)

    def _ask(self, prompt: Any, max_tokens: int) -> Iterator[int]:
        request = Request(prompt, max_tokens, queue.SimpleQueue())
        self._submitted.put(request)
        return _until(request)

    def run(self) -> None:
        """Steps for ever; waits while nothing is asked."""
        running: dict[Any, Request] = {}
        for request_id in itertools.count():
            try:
                request = self._submitted.get(block=not running)
            except queue.Empty:
                self._step(running)
                continue
            config = self._genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos = request.max_tokens, True
            config.do_sample = False
            running[self._pipe.add_request(request_id, request.prompt, config)] = request

    def _step(self, running: dict[Any, Request]) -> None:
        self._pipe.step()
        for handle, request in list(running.items()):
            if handle.can_read():
                request.steps.put(sum(len(each.generated_ids) for each in handle.read().values()))
            if handle.get_status() != self._genai.GenerationStatus.RUNNING:
                del running[handle]


def _until(request: Request) -> Iterator[int]:
    num_tokens = 0
    while num_tokens < request.max_tokens:
        yield (step := request.steps.get())
        num_tokens += step


def measure(engine: Engine) -> None:
    """Print what :data:`SCENARIOS` take, in this process."""
    rng = random.Random(0)
    times: dict[Scenario, list[float]] = {scenario: [] for scenario in SCENARIOS}
    for number in range(NUM_ROUNDS + 1):  # the first warms up
        for scenario, seconds in times.items():
            begun_s = time.monotonic()
            asked = [
                engine.submit_ids(
                    rng.choices(WORDS, k=scenario.num_prompt_tokens), scenario.max_tokens
                )
                for _ in range(scenario.num_streams)
            ]
            for steps in asked:
                collections.deque(steps, maxlen=0)
            if number:
                seconds.append(time.monotonic() - begun_s)
    for scenario, seconds in times.items():
        num_tokens = scenario.max_tokens if scenario.max_tokens > 1 else scenario.num_prompt_tokens
        rate = scenario.num_streams * num_tokens / statistics.median(seconds)
        kind = "output" if scenario.max_tokens > 1 else "prompt"
        print(f"{scenario.num_streams} at a time: {rate:.1f} {kind} tokens/s", flush=True)  # noqa: T201


class Handler(BaseHTTPRequestHandler):
    """POST /v1/completions, on a connection that is kept."""

    protocol_version = "HTTP/1.1"
    engine: Engine

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        num_prompt_tokens, steps = self.engine.submit(asked["prompt"], asked["max_tokens"])
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        num_output_tokens = 0
        for step in steps:
            num_output_tokens += step
            self._send({"choices": [{"index": 0, "text": ""}]})
        usage = {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_output_tokens}
        self._send({"choices": [], "usage": usage})
        self._write(b"data: [DONE]\n\n")
        self._write(b"")

    def _send(self, event: dict[str, Any]) -> None:
        self._write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _write(self, chunk: bytes) -> None:
        """The empty one ends the answer."""
        self.wfile.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    """Admits as many connections at once as peers.py opens (the default of 5 resets the rest)."""

    request_queue_size = 128


def main() -> None:
    parser = argparse.ArgumentParser(description="OpenVINO GenAI behind the completions API")
    parser.add_argument("folder", help="what optimum-cli exported")
    parser.add_argument("--port", type=int, default=8105)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--measure", action="store_true", help="without a server")
    options = parser.parse_args()
    engine = Engine(options.folder, options.threads)
    if options.measure:
        threading.Thread(target=engine.run, daemon=True).start()
        measure(engine)
        return
    Handler.engine = engine
    server = Server(("127.0.0.1", options.port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    engine.run()


if __name__ == "__main__":
    main()

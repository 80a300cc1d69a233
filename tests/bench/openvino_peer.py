"""OpenVINO GenAI behind the completions API, in its own process; run by its own environment.

    $PEERS/ov/bin/python tests/bench/openvino_peer.py $PEERS/gemma-ov --port 8105

Needs openvino-genai and nothing of Diptych. Float32, two threads, keys and values in
float32, continuous batching in steps of 512 tokens. It answers what peers.py asks, no more:
streams, greedy, the end-of-sequence token ignored.
"""

import argparse
import importlib
import itertools
import json
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Request(NamedTuple):
    """One prompt; the numbers of tokens that each step gave go to ``steps``."""

    prompt: Any  # tensor of token ids, [1, num_tokens]
    max_tokens: int
    steps: "queue.SimpleQueue[int]"


class Engine:
    """The pipeline. ``run`` owns it, on one thread; others submit."""

    def __init__(self, folder: str, num_threads: int) -> None:
        # Not installed where Diptych is developed.
        self._genai: Any = importlib.import_module("openvino_genai")
        scheduler = self._genai.SchedulerConfig()
        scheduler.max_num_batched_tokens, scheduler.cache_size = 512, 2
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
        request = Request(prompt, max_tokens, queue.SimpleQueue())
        self._submitted.put(request)
        return prompt.shape[1], _until(request)

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


class Handler(BaseHTTPRequestHandler):
    """POST /v1/completions."""

    engine: Engine

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        num_prompt_tokens, steps = self.engine.submit(asked["prompt"], asked["max_tokens"])
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        num_output_tokens = 0
        for step in steps:
            num_output_tokens += step
            self._send({"choices": [{"index": 0, "text": ""}]})
        usage = {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_output_tokens}
        self._send({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

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
    options = parser.parse_args()
    Handler.engine = Engine(options.folder, options.threads)
    server = Server(("127.0.0.1", options.port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Handler.engine.run()


if __name__ == "__main__":
    main()

"""A prompt that one process computes and another one goes on with: the tokens of one process.

The reader pulls each range while the source computes the next; what is left to pull when the last
one was announced is what a request waits for. Run as a program it is the source, for ``check``.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import torch

from diptych.engine.backends.base import Backend
from diptych.engine.backends.choice import make_backend
from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.kv.cache import KVCache
from diptych.engine.model.config import ModelConfig
from diptych.engine.runner import Runner
from diptych.engine.scheduling.step import Chunk, SampledToken, SampleSpec, StepPlan
from diptych.sampling_params import SamplingParams
from diptych.worker.pool_memory import pool_memory
from kvtransfer.reader.pairs import PeerKey
from kvtransfer.reader.pull_machine import PullRequest
from tests.gpu.handoff import NotJoinedError, process_of, reader_of
from tests.gpu.models import MODELS, random_decoder
from tests.integration.transfer_rig import BLOCK_SIZE, NUM_SCRATCH, config, open_source

_GREEDY = SampleSpec(params=SamplingParams(temperature=0.0, max_tokens=2**20), allow_stop=False)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PATIENCE_S = 100.0  # of which a first process compiles its kernels in most


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model with random weights, alike in both processes, and a prompt for it."""

    name: str
    sizes: Mapping[str, Any]  # entries of config.json
    transport: str
    dtype: str = "bfloat16"
    num_tokens: int = 8192
    chunk: int = 1024  # tokens of a step of it
    num_decoded: int = 16

    @property
    def num_blocks(self) -> int:
        """Of the prompt and what follows it."""
        return -(-(self.num_tokens + self.num_decoded) // BLOCK_SIZE)

    @property
    def token_ids(self) -> list[int]:
        return [5 + (7 * n) % 97 for n in range(self.num_tokens)]


_LLAMA: Mapping[str, Any] = {**MODELS["Llama-3.1-8B"], "num_hidden_layers": 32}
CASES = tuple(
    Case(name="Llama-3.1-8B", sizes=_LLAMA, transport=each) for each in ("nixl", "staged")
)


@dataclass(frozen=True, slots=True)
class Continued:
    """Of one case."""

    case: str
    way: str  # as the pair says
    message: str  # why there is none
    prefill_s: float
    exposed_s: float  # from the last announcement to the proof
    exposed_share: float  # of the prompt's seconds
    bytes_per_s: float
    num_equal: int  # of the tokens, before the first that is another
    holds: bool  # all are those of one process


class _Computed:
    """One process's model and pool."""

    def __init__(self, case: Case, backend: Backend) -> None:
        dtype = _DTYPES[case.dtype]
        model_config = ModelConfig.from_hf(case.sizes)
        num_blocks = case.num_blocks + NUM_SCRATCH
        self.cache = KVCache(model_config, num_blocks, BLOCK_SIZE, dtype, backend.kv_memory)
        decoder = random_decoder(model_config, backend, dtype)
        self._case, self._runner = case, Runner(decoder, self.cache, backend)
        self._table = tuple(range(case.num_blocks))
        self._runner.warm_up(max_rows=1)

    def prefill(self, start: int) -> int | None:
        """A step of the prompt; the first token behind it, if that was all."""
        ids = self._case.token_ids[start : start + self._case.chunk]
        return self._step(ids, start, start + len(ids) == self._case.num_tokens)

    def prefill_all(self) -> int:
        for start in range(0, self._case.num_tokens, self._case.chunk):
            first = self.prefill(start)
        assert first is not None, "the last step draws one"
        return first

    def decode(self, first: int) -> list[int]:
        """What follows, and ``first``."""
        tokens = [first]
        while len(tokens) < self._case.num_decoded:
            token = self._step(tokens[-1:], self._case.num_tokens + len(tokens) - 1, True)
            assert token is not None
            tokens.append(token)
        return tokens

    def _step(self, ids: Sequence[int], start: int, is_drawn: bool) -> int | None:
        chunk = Chunk(
            token_ids=tuple(ids),
            start=start,
            block_table=self._table,
            sample=_GREEDY if is_drawn else None,
        )
        (token,) = self._runner.execute(StepPlan(chunks=(chunk,))).tokens
        if not is_drawn:
            return None
        assert isinstance(token, SampledToken), token
        return token.token_id


def check(case: Case, backend: Backend, command: Sequence[str] | None = None) -> Continued:
    """command: of the source, instead of its own on that backend's device."""
    told = f"{case.name}, {case.num_tokens} tokens, {case.dtype}, {case.transport}"
    try:
        return asyncio.run(_check(case, told, backend, command))
    except NotJoinedError as error:
        return Continued(told, "", str(error), 0.0, 0.0, 0.0, 0.0, 0, False)


async def _check(
    case: Case, told: str, backend: Backend, command: Sequence[str] | None
) -> Continued:
    own = _Computed(case, backend)
    want = own.decode(own.prefill_all())
    own.cache.tensor.zero_()
    backend.synchronise()
    started = command or source_command(case, backend.device)
    async with process_of(started, _PATIENCE_S) as source:
        hello = await source.hear()
        key = PeerKey(hello["address"], "source")
        async with reader_of(case.transport, own.cache, key) as (reader, pair):
            request = PullRequest(
                source_address=key.address,
                source_incarnation=key.incarnation,
                ticket=bytes.fromhex(hello["ticket"]),
                first_missing_token=0,
                num_tokens=case.num_tokens,
                prompt_digest=b"",
                local_block_ids=tuple(range(-(-case.num_tokens // BLOCK_SIZE))),
            )
            async with asyncio.TaskGroup() as tasks:
                pull = tasks.create_task(reader.pairs.open_pull(request).run())
                await source.say("compute")
                computed = await source.hear()
            proven_s = time.monotonic()  # one clock for all processes of a machine
            stats = pull.result().stats
            got = own.decode(computed["first"])
            exposed_s = proven_s - computed["announced_s"]
            num_equal = next(
                (n for n, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), len(want)
            )
            return Continued(
                case=told,
                way=pair.way,
                message=pair.message,
                prefill_s=computed["prefill_s"],
                exposed_s=exposed_s,
                exposed_share=exposed_s / computed["prefill_s"],
                bytes_per_s=stats.num_bytes / max(stats.read_s, 1e-9),
                num_equal=num_equal,
                holds=num_equal == len(want),
            )


def source_command(case: Case, device: torch.device) -> Sequence[str]:
    """As a program; ``device``: of torch's, cpu for a test."""
    told = {name: getattr(case, name) for name in case.__dataclass_fields__}
    arguments = (f"--device={device.type}", f"--case={json.dumps(told)}")
    return (sys.executable, "-m", "tests.gpu.continued", *arguments)


async def _serve(case: Case, backend: Backend) -> None:
    """Be the source: compute when told to, until stdin ends."""
    loop = asyncio.get_running_loop()
    own = _Computed(case, backend)
    memory = pool_memory(own.cache)
    async with (
        _model_thread() as thread,
        open_source(
            config(case.transport),
            memory=memory,
            num_blocks=memory.num_blocks,
            block_bytes=memory.block_bytes,
        ) as source,
    ):
        num_blocks = -(-case.num_tokens // BLOCK_SIZE)
        ticket = source.lease("lease", range(num_blocks), case.num_tokens, "reader")
        _say({"address": source.address, "ticket": ticket.hex()})
        await loop.run_in_executor(None, sys.stdin.readline)
        begin_s, first = time.monotonic(), None
        for start in range(0, case.num_tokens, case.chunk):
            first = await loop.run_in_executor(thread, own.prefill, start)
            source.leases.announce("lease", min(start + case.chunk, case.num_tokens))
        end_s = time.monotonic()
        _say({"first": first, "prefill_s": end_s - begin_s, "announced_s": end_s})
        await loop.run_in_executor(None, sys.stdin.read)


@asynccontextmanager
async def _model_thread() -> AsyncIterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as thread:
        yield thread


def _say(told: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    parser.add_argument("--case", required=True)
    told = parser.parse_args()
    backend: Backend = TorchBackend(torch.device("cpu"))
    if told.device == "cuda":
        backend = make_backend("cuda")
    asyncio.run(_serve(Case(**json.loads(told.case)), backend))


if __name__ == "__main__":
    main()

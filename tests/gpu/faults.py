"""Memory that runs out in a step fails that step's sequences alone; a lost device ends the engine.

Run as a program it loses its device, for ``check_loss``: no other process may be hurt by that.
"""

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass

import torch

from diptych.engine.backends.base import Backend
from diptych.engine.backends.choice import make_backend
from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.engine import StepEngine
from diptych.engine.kv.cache import KVCache
from diptych.engine.model.config import ModelConfig
from diptych.engine.runner import Runner
from diptych.engine.scheduling.block_pool import BlockPool
from diptych.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from diptych.engine.scheduling.sequence import Sequence as Generated
from diptych.engine.scheduling.sequence import SequenceKey, SequenceState
from diptych.engine.scheduling.step import SequenceUpdate
from diptych.errors import DeviceLostError, DiptychError, StepFailedError
from diptych.sampling_params import SamplingParams
from tests.gpu.models import random_decoder

BLOCK_SIZE = 32
NUM_SHORT = 8  # tokens of a prompt, and of its answer
LEFT_BYTES = 128 << 20  # less than a layer of a long step needs
_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """A long prompt where there is no memory for its step, then a short one, then the long one."""

    case: str
    failed: str  # what the long one was told
    is_gone_on: bool  # the short one said the same as before
    is_freed: bool  # no block is in use afterwards
    is_whole: bool  # with memory the long one has an answer
    holds: bool


@dataclass(frozen=True, slots=True)
class Loss:
    """Of a device, in a process of its own."""

    case: str
    told: str  # what its engine ended with
    others_go_on: bool  # the same device computes here
    holds: bool


class _Rig:
    """An engine, and what its sequences were told."""

    def __init__(
        self, config: ModelConfig, backend: Backend, dtype: torch.dtype, num_long: int
    ) -> None:
        num_blocks = 2 * (num_long // BLOCK_SIZE + 2)
        decoder = random_decoder(config, backend, dtype)
        cache = KVCache(config, num_blocks, BLOCK_SIZE, dtype, backend.kv_memory)
        runner = Runner(decoder, cache, backend)
        runner.warm_up(max_rows=1)
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        limits = SchedulerConfig(
            max_model_len=num_long + 2 * BLOCK_SIZE, max_batched_tokens=num_long, max_num_seqs=4
        )
        self.engine = StepEngine(
            Scheduler(limits, self.pool),
            runner,
            launcher=runner if runner.steps_in_flight > 1 else None,
        )
        self._updates: list[SequenceUpdate] = []
        self._heard = asyncio.Event()
        self._num_asked = 0
        self.engine.subscribe(self._listen)

    def _listen(self, updates: list[SequenceUpdate]) -> None:
        self._updates += updates
        self._heard.set()

    async def ask(self, num_prompt_tokens: int) -> list[int] | DiptychError:
        """The answer to a prompt of so many tokens, or why there is none."""
        self._num_asked += 1
        seq = Generated(
            key=SequenceKey("router", self._num_asked),
            token_ids=[5 + n % 99 for n in range(num_prompt_tokens)],
            num_prompt_tokens=num_prompt_tokens,
            sampling=SamplingParams(temperature=0.0, max_tokens=NUM_SHORT),
            cache_salt=bytes([self._num_asked]),  # nothing of it is there
        )
        self.engine.reserve(seq)
        self.engine.start(seq, [], compute_missing=True)
        while seq.state is not SequenceState.FINISHED:
            self._heard.clear()
            await self._heard.wait()
        error = next((each.error for each in reversed(self._updates) if each.sequence is seq), None)
        return error if error is not None else seq.token_ids[num_prompt_tokens:]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(self.engine.run(), name="engine")
            yield
            task.cancel()


def check_memory(
    name: str,
    config: ModelConfig,
    backend: Backend,
    dtype: torch.dtype,
    filled: AbstractContextManager[None],
    num_long: int = 8192,
) -> OutOfMemory:
    """filled: within it there is no memory for a step of ``num_long`` tokens."""
    return asyncio.run(_out_of_memory(name, config, backend, dtype, filled, num_long))


async def _out_of_memory(
    name: str,
    config: ModelConfig,
    backend: Backend,
    dtype: torch.dtype,
    filled: AbstractContextManager[None],
    num_long: int,
) -> OutOfMemory:
    rig = _Rig(config, backend, dtype, num_long)
    async with rig.running():
        want = await rig.ask(NUM_SHORT)
        with filled:
            failed = await rig.ask(num_long)
            is_gone_on = await rig.ask(NUM_SHORT) == want
        is_freed = rig.pool.counts().running == 0
        is_whole = isinstance(await rig.ask(num_long), list)
    is_told = isinstance(failed, StepFailedError)
    holds = is_told and is_gone_on and is_freed and is_whole and isinstance(want, list)
    told = failed.reason if isinstance(failed, DiptychError) else "nothing"
    return OutOfMemory(f"{name}, {num_long} tokens", told, is_gone_on, is_freed, is_whole, holds)


@contextmanager
def filled_device(device: torch.device, left_bytes: int = LEFT_BYTES) -> Iterator[None]:
    """Nobody has more than so much of it left."""
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info(device)
    taken = torch.empty(max(free_bytes - left_bytes, 0), dtype=torch.uint8, device=device)
    try:
        yield
    finally:
        del taken
        torch.cuda.empty_cache()


def check_loss(device: torch.device) -> Loss:
    """Of the device under an engine, in a process of its own."""
    try:
        done = subprocess.run(
            loss_command(device), capture_output=True, timeout=_PATIENCE_S, check=False
        )
        told = str(json.loads(done.stdout or b'{"told": "nothing"}')["told"])
    except subprocess.TimeoutExpired:
        told = f"nothing within {_PATIENCE_S:.0f} s"
    goes_on = float(torch.ones(1000, device=device).sum()) == 1000.0
    holds = told.startswith(DeviceLostError.__name__) and goes_on
    return Loss(f"{device}, by an assertion on it", told, goes_on, holds)


def loss_command(device: torch.device) -> Sequence[str]:
    return (sys.executable, "-m", "tests.gpu.faults", f"--device={device.type}")


async def ended_with(
    config: ModelConfig, backend: Backend, dtype: torch.dtype, lose: Callable[[], None]
) -> str:
    """What ends an engine whose device is lost between two sequences."""
    rig = _Rig(config, backend, dtype, 4 * BLOCK_SIZE)
    try:
        async with asyncio.timeout(_PATIENCE_S), rig.running():
            await rig.ask(NUM_SHORT)
            lose()
            answer = await rig.ask(NUM_SHORT)
            return f"nothing: {answer}"
    except ExceptionGroup as group:
        return "; ".join(f"{type(each).__name__}: {each}" for each in group.exceptions)


def lose(device: torch.device) -> None:
    """Have it read what is not there: its driver ends all that it does for this process."""
    if device.type == "cuda":
        torch.zeros(4, device=device).index_select(0, torch.tensor([9], device=device))


TINY = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    name = parser.parse_args().device
    backend: Backend = TorchBackend(torch.device(name))
    if name == "cuda":
        backend = make_backend("cuda")
    config, device = ModelConfig.from_hf(TINY), backend.device
    told = asyncio.run(ended_with(config, backend, torch.float32, lambda: lose(device)))
    sys.stdout.write(json.dumps({"told": told}) + "\n")


if __name__ == "__main__":
    main()

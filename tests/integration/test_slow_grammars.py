"""Steps of others go on while the grammar of a sequence is compiled, however long that takes."""

import asyncio
import json
from pathlib import Path

import llguidance
import pytest

from diptych.constraint import OutputGrammar
from diptych.engine.engine import StepEngine
from diptych.engine.kv.cache import KVCache
from diptych.engine.runner import Runner
from diptych.engine.scheduling.block_pool import BlockPool
from diptych.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from diptych.engine.scheduling.sequence import Sequence, SequenceKey, SequenceState
from diptych.engine.scheduling.step import SequenceUpdate
from diptych.errors import InvalidRequestError
from diptych.sampling_params import SamplingParams
from diptych.text.grammars import Grammars
from tests.engines import CPU, load_decoder

BLOCK_SIZE, NUM_BLOCKS = 8, 64
# Half a second; a step of the model takes some milliseconds.
SLOW = llguidance.LLMatcher.grammar_from_json_schema(
    json.dumps({"type": "integer", "multipleOf": 30011})
)
WRONG = "start: ("
MANY_STEPS = 20


class Rig:
    """One engine over a tiny model."""

    def __init__(self, folder: Path) -> None:
        decoder = load_decoder(folder)
        config = SchedulerConfig(max_model_len=400, max_batched_tokens=64, max_num_seqs=4)
        grammars = Grammars.from_folder(folder, decoder.config.vocab_size)
        runner = Runner(decoder, KVCache(decoder.config, NUM_BLOCKS, BLOCK_SIZE), CPU, grammars)
        scheduler = Scheduler(config, BlockPool(NUM_BLOCKS, BLOCK_SIZE))
        self.engine = StepEngine(scheduler, runner, prepare=runner.prepare)
        self.first: dict[Sequence, int] = {}  # the step in which each was told of first
        self.errors: dict[Sequence, Exception] = {}
        self._stepped = asyncio.Event()
        self.engine.subscribe(self._listen)

    def start(self, number: int, max_tokens: int, grammar: str | None = None) -> Sequence:
        constraint = None if grammar is None else OutputGrammar(grammar, frozenset({2}))
        seq = Sequence(
            key=SequenceKey("router", number),
            token_ids=[number] * 4,
            num_prompt_tokens=4,
            sampling=SamplingParams(max_tokens=max_tokens, constraint=constraint),
        )
        self.engine.reserve(seq)
        self.engine.start(seq, [], compute_missing=True)
        return seq

    async def until(self, *seqs: Sequence) -> None:
        """Each of them was told of."""
        async with asyncio.timeout(60.0):
            while not all(seq in self.first for seq in seqs):
                self._stepped.clear()
                await self._stepped.wait()

    def _listen(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            self.first.setdefault(update.sequence, self.engine.num_steps)
            if update.error is not None:
                self.errors[update.sequence] = update.error
        self._stepped.set()


@pytest.mark.parametrize("beside", ["a wrong one", "a slow one"])
async def test_no_step_waits_for_a_compiler(tiny_llama: Path, beside: str) -> None:
    """One thread compiles: what fails waits behind what is slow, and ends as it ever did."""
    rig = Rig(tiny_llama)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(rig.engine.run(), name="engine")
        other = rig.start(5, max_tokens=380)
        await rig.until(other)
        began = rig.engine.num_steps
        slow = rig.start(6, 4, SLOW)
        last = rig.start(7, 4, WRONG if beside == "a wrong one" else SLOW)
        gone = rig.start(8, 4, SLOW)
        rig.engine.release(gone)
        await rig.until(slow, last)
        assert min(rig.first[slow], rig.first[last]) > began + MANY_STEPS
        assert gone not in rig.first
        if beside == "a wrong one":
            assert isinstance(rig.errors[last], InvalidRequestError)
        assert slow not in rig.errors
        rig.engine.release(other)
        rig.engine.release(slow)
        rig.engine.release(last)
        running.cancel()
    assert other.state is SequenceState.FINISHED

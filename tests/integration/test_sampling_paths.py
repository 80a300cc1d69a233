"""However an answer is made, every sampling option draws what its definition says.

The definition is transformers' logits and the naive sampler; the ways are one engine, a
hand-off, a resumed answer and a preempted one. What the workers are told crosses the wire.
"""

import itertools
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from diptych.engine.kv.cache import KVCache
from diptych.engine.model.decoder import Decoder
from diptych.engine.runner import Runner
from diptych.engine.scheduling.block_pool import BlockPool
from diptych.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from diptych.engine.scheduling.sequence import Sequence as EngineSequence
from diptych.engine.scheduling.sequence import SequenceKey, SequenceState
from diptych.engine.scheduling.step import History, SampleSpec
from diptych.sampling_params import SamplingParams
from diptych.v1 import common_pb2
from tests import hf_reference
from tests.engines import CPU, load_decoder
from tests.integration.conftest import BLOCK_SIZE
from tests.naive_sampler import Naive
from tests.notes import Note
from tests.prompts import prompt
from tests.torch_threads import torch_threads

IS_LONG = settings.get_current_profile_name() == "long"
NUM_EXAMPLES = 500 if IS_LONG else 10
NUM_TOKENS = 20
MAX_LEN = 64
NUM_BEFORE_PREEMPTION = 13  # output tokens after which two sequences have too few blocks
PROMPT = prompt(20, seed=3)
SAFE = 1e-4  # nearer to another token than this, rounding may decide either way; of logprobs too
# Tokens that are likely again and again, so that penalties matter: some of the prompt, some not.
LIKELY = dict.fromkeys((*PROMPT[:3], 5, 6, 9), 30.0)


class Definition(NamedTuple):
    """What has to be drawn, up to where rounding may decide otherwise."""

    token_ids: list[int]
    changed: list[int]  # where that option made a difference
    logprobs: list[float]  # of each token, in the model's own words

    @property
    def drawn(self) -> "list[Drawn]":
        return list(map(Drawn, self.token_ids, self.logprobs))


class Drawn(NamedTuple):
    """A token that an engine drew, and what it says of it."""

    token_id: int
    logprob: float


class Engine:
    """Scheduler, pool and runner, stepped by hand."""

    def __init__(self, model: Decoder, num_blocks: int = 16) -> None:
        cache = KVCache(model.config, num_blocks, BLOCK_SIZE)
        config = SchedulerConfig(
            max_model_len=MAX_LEN, max_batched_tokens=32, max_num_seqs=8, decode_headroom_blocks=0
        )
        self._scheduler = Scheduler(config, BlockPool(num_blocks, BLOCK_SIZE))
        self._runner = Runner(model, cache, CPU)
        self._drawn: dict[EngineSequence, list[Drawn]] = defaultdict(list)

    def prefill(self, params: SamplingParams, emitted: Sequence[int]) -> Drawn:
        """The token that a prefill worker draws after ``emitted``."""
        seq = sequence(1, params, emitted, prefill_only=True)
        self._scheduler.add_prefill(seq)
        self._run()
        assert seq.state is SequenceState.LEASED
        self._scheduler.release(seq)
        (drawn,) = self._drawn[seq]
        return drawn

    def start(self, seq: EngineSequence, emitted: Sequence[int] = ()) -> None:
        self._scheduler.reserve(seq)
        self._scheduler.start(seq, list(emitted), compute_missing=True)

    def finish_one(self, seq: EngineSequence, emitted: Sequence[int] = ()) -> list[Drawn]:
        """What is drawn until it and all that was started have ended; it goes on after
        ``emitted``."""
        self.start(seq, emitted)
        self._run()
        assert seq.state is SequenceState.FINISHED
        drawn = self._drawn[seq]
        assert seq.token_ids[-len(drawn) :] == [each.token_id for each in drawn]
        return drawn

    def _run(self) -> None:
        while self._scheduler.has_work:
            plan = self._scheduler.schedule()
            assert plan is not None
            for update in self._scheduler.update(plan, self._runner.execute(plan)):
                if update.token is not None:
                    assert update.token.logprobs is not None
                    drawn = Drawn(update.token.token_id, update.token.logprobs.logprob)
                    self._drawn[update.sequence].append(drawn)


def sequence(
    number: int,
    params: SamplingParams,
    emitted: Sequence[int] = (),
    *,
    prefill_only: bool = False,
    salt: bytes = b"",
) -> EngineSequence:
    """As a worker makes it of what the router sends."""
    spec = common_pb2.SequenceSpec(
        token_ids=[*PROMPT, *emitted],
        num_prompt_tokens=len(PROMPT),
        sampling=params.to_proto(),
        cache_salt=salt,
    )
    key = SequenceKey("router", number)
    return EngineSequence.from_spec(key, spec, prefill_only=prefill_only)


def define(folder: Path, params: SamplingParams, option: str = "") -> Definition:
    """Token by token, each from all tokens before it."""
    params = SamplingParams.from_proto(params.to_proto())  # numbers have 32 bits on the wire
    neutral = {option: getattr(SamplingParams(), option)} if option else {}
    made = Definition([], [], [])
    while len(made.token_ids) < params.max_tokens:
        tokens = [*PROMPT, *made.token_ids]
        scores = hf_reference.logits(folder, tokens)[-1]
        logits = scores.numpy()
        spec = SampleSpec(
            params=params,
            allow_stop=len(made.token_ids) >= params.min_tokens,
            history=History(array("q", tokens), len(PROMPT)),
        )
        drawn = Naive(logits, spec, len(tokens))
        if min(drawn.margin, drawn.filter_slack) < SAFE:
            break
        without = replace(spec, params=replace(params, **neutral))
        if Naive(logits, without, len(tokens)).token_id != drawn.token_id:
            made.changed.append(len(made.token_ids))
        made.token_ids.append(drawn.token_id)
        made.logprobs.append(float(torch.log_softmax(scores.double(), 0)[drawn.token_id]))
        if spec.allow_stop and drawn.token_id in params.stop_token_ids:
            break
    return made


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Decoder:
    return load_decoder(tiny_llama)


def check_all(
    model: Decoder, params: SamplingParams, expected: list[Drawn], num_resumed: int
) -> None:
    """Every way of making the answer draws what is expected, and says how likely it was."""
    if not expected:
        return
    begin = expected[: max(num_resumed, 0)]
    emitted = [each.token_id for each in begin]
    made = {
        "one engine": Engine(model).finish_one(sequence(1, params)),
        "resumed": begin + Engine(model).finish_one(sequence(1, params, emitted)),
        "handed over": handed_over(model, params, []),
        "resumed and handed over": begin + handed_over(model, params, emitted),
        "preempted": preempted(model, params),
    }
    for name, got in made.items():
        same = got[: len(expected)]
        assert [each.token_id for each in same] == [each.token_id for each in expected], name
        told = [each.logprob for each in same]
        assert told == pytest.approx([each.logprob for each in expected], abs=SAFE, rel=0), name


def handed_over(model: Decoder, params: SamplingParams, emitted: list[int]) -> list[Drawn]:
    """The first token of a prefill worker, the others of a decode worker."""
    first = Engine(model).prefill(params, emitted)
    num_output = len(emitted) + 1
    is_over = first.token_id in params.stop_token_ids and len(emitted) >= params.min_tokens
    if is_over or num_output == params.max_tokens:
        return [first]
    return [first, *Engine(model).finish_one(sequence(2, params, emitted), [first.token_id])]


def preempted(model: Decoder, params: SamplingParams) -> list[Drawn]:
    """Beside an older one that takes its blocks."""
    engine = Engine(model, num_blocks=5)
    older = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS + 8, logprobs=0)
    engine.start(sequence(1, older, salt=b"shares nothing"))
    seq = sequence(2, params)
    output = engine.finish_one(seq)
    assert seq.num_preemptions or len(output) < NUM_TOKENS
    return output


BAD_WORDS = frozenset({(5,), (6, 392), (6, 6), (392, 306), (392, 6, 9)})
LIKELY_DRAWN: dict[str, Any] = {"logit_bias": LIKELY, "temperature": 2.0}
OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 3.0, "seed": 3},
    "top_k": {"temperature": 3.0, "top_k": 3},
    "top_p": {"temperature": 3.0, "top_p": 0.05},
    "min_p": {"temperature": 3.0, "min_p": 0.5},
    "logit_bias": {"logit_bias": {7: 50.0}},
    "bad_words": {**LIKELY_DRAWN, "bad_words": BAD_WORDS, "seed": 4},
    "repetition_penalty": {**LIKELY_DRAWN, "repetition_penalty": 1.5, "temperature": 4, "seed": 3},
    "presence_penalty": {**LIKELY_DRAWN, "presence_penalty": 2.0, "seed": 20},
    "frequency_penalty": {**LIKELY_DRAWN, "frequency_penalty": 2.0, "seed": 0},
}


def params_of(**options: Any) -> SamplingParams:
    plain = {"temperature": 0.0, "seed": 2, "max_tokens": NUM_TOKENS, "logprobs": 0}
    return SamplingParams(**{**plain, **options})


@pytest.mark.parametrize("option", OPTIONS)
def test_no_worker_may_forget_an_option(tiny_llama: Path, model: Decoder, option: str) -> None:
    """It decides about tokens of each worker: of prefill, of decode, of whoever goes on later."""
    params = params_of(**OPTIONS[option])
    defined = define(tiny_llama, params, option)
    *before, middle, last = [index for index in defined.changed if index]
    assert 0 in defined.changed or option in ("presence_penalty", "frequency_penalty")
    assert before
    assert middle < last
    assert last >= NUM_BEFORE_PREEMPTION
    check_all(model, params, defined.drawn, num_resumed=middle)


ALL_MIXED: dict[str, Any] = {
    "temperature": st.sampled_from((0.5, 1.0, 3.0)),
    "top_k": st.sampled_from((1, 3, 40)),
    "top_p": st.sampled_from((0.05, 0.5, 0.95)),
    "min_p": st.sampled_from((0.02, 0.5)),
    "repetition_penalty": st.sampled_from((0.8, 1.5)),
    "presence_penalty": st.sampled_from((-1.0, 2.0)),
    "frequency_penalty": st.sampled_from((-0.5, 1.0)),
    "logit_bias": st.sampled_from((LIKELY, {7: -100.0, 8: 20.0})),
    "bad_words": st.sampled_from((frozenset({(7,)}), BAD_WORDS)),
    "min_tokens": st.just(12),
    "stop_token_ids": st.just(frozenset({5, 9, 392})),
    "seed": st.integers(0, 2**64 - 1),
}
MIXED = st.fixed_dictionaries({}, optional=ALL_MIXED)


def test_options_together(tiny_llama: Path, model: Decoder, note: Note) -> None:
    tokens = 0
    pairs: Counter[frozenset[str]] = Counter()

    @settings(deadline=None, max_examples=NUM_EXAMPLES)
    @given(options=MIXED, num_resumed=st.integers(1, NUM_TOKENS - 2))
    def check(options: dict[str, Any], num_resumed: int) -> None:
        nonlocal tokens
        params = params_of(**options)
        expected = define(tiny_llama, params).drawn
        check_all(model, params, expected, min(num_resumed, len(expected) - 1))
        tokens += len(expected)
        pairs.update(map(frozenset, itertools.combinations(options, 2)))

    check()
    note(f"{tokens} tokens, {len(pairs)} pairs of options, together {pairs.total()} times")
    if IS_LONG:
        missing = set(map(frozenset, itertools.combinations(ALL_MIXED, 2))) - pairs.keys()
        assert not missing

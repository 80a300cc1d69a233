"""The sampler equals a naive one, row by row, whatever the batch."""

import math
from array import array
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from transformers.generation import logits_process

from diptych.engine.backends.base import Backend
from diptych.engine.sampling.logit_edits import edit_logits
from diptych.engine.sampling.sampler import mix, sample
from diptych.engine.scheduling.step import History, SampledToken, SampleSpec
from diptych.errors import LogitsError
from diptych.sampling_params import SamplingParams
from tests.engines import CPU, PLAIN
from tests.naive_sampler import Naive, naive_mix
from tests.sampling_cases import NO_BIAS, SPECS, random_logits, spec


def draw(logits: torch.Tensor, specs: list[SampleSpec], positions: list[int]) -> list[SampledToken]:
    drawn = sample(logits.clone(), specs, positions)
    tokens = [token for token in drawn if isinstance(token, SampledToken)]
    assert len(tokens) == len(drawn)
    return tokens


def test_mix_is_the_documented_hash() -> None:
    seeds = [0, 1, 2**64 - 1, 12345678901234567890, 7, 7]
    positions = [0, 1, 2**31, 5, 0, 1]
    for stream in (0, 3):
        expected = [naive_mix(s, p, stream) for s, p in zip(seeds, positions, strict=True)]
        assert mix(seeds, positions, stream).tolist() == expected
    # Pinned: changing the hash changes every seeded answer.
    assert mix([42], [7]).tolist() == [naive_mix(42, 7)] == [0.33493855816005447]


def test_mix_is_uniform_in_positions_and_in_seeds() -> None:
    count = 20_000
    for u in (mix([3] * count, range(count)), mix(range(count), [3] * count)):
        assert 0 <= u.min() < 1e-3
        assert 1 - 1e-3 < u.max() < 1
        cells = np.histogram(u, bins=100, range=(0, 1))[0]
        assert ((cells - count / 100) ** 2 / (count / 100)).sum() < 160  # chi-square, 99 degrees
        assert abs(np.corrcoef(u[1:], u[:-1])[0, 1]) < 0.03


@settings(deadline=None, max_examples=150)
@given(
    specs=st.lists(SPECS, min_size=1, max_size=6),
    seed=st.integers(0, 10**6),
    vocab_size=st.sampled_from((101, 512, 1024, 1025, 3000)),
    spread=st.sampled_from((0.0, 0.1, 2.0, 12.0)),
    position=st.integers(0, 10**6),
)
@example(  # the share of top_p is of the 1500 kept, of which 1024 are looked at first
    specs=[spec(top_k=1500, top_p=0.9, seed=seed) for seed in range(6)],
    seed=0,
    vocab_size=3000,
    spread=2.0,
    position=0,
)
def test_equals_the_definition(
    specs: list[SampleSpec], seed: int, vocab_size: int, spread: float, position: int
) -> None:
    logits = random_logits(seed, len(specs), vocab_size, spread)
    positions = [position + row for row in range(len(specs))]
    drawn = draw(logits, specs, positions)
    for row, token in enumerate(drawn):
        naive = Naive(logits[row].numpy(), specs[row], positions[row])
        if specs[row].params.temperature == 0:
            assert token.token_id == naive.token_id or naive.margin < 1e-6
            continue
        assert naive.weights[token.token_id] > 0 or naive.filter_slack < 1e-6
        if naive.margin > 1e-5 and naive.filter_slack > 1e-6:
            assert token.token_id == naive.token_id
        alone = draw(logits[row : row + 1], [specs[row]], [positions[row]])
        assert alone[0].token_id == token.token_id
        assert alone[0].margin == pytest.approx(token.margin, abs=1e-9)


@settings(deadline=None, max_examples=60)
@given(
    levels=st.lists(st.integers(0, 3), min_size=2, max_size=1500),
    top_k=st.integers(1, 1500),
    top_p=st.sampled_from((1.0, 0.7, 0.3)),
    seed=st.integers(0, 1000),
)
def test_equal_logits_rank_by_id(levels: list[int], top_k: int, top_p: float, seed: int) -> None:
    logits = torch.tensor([levels], dtype=torch.float32)
    wanted = spec(top_k=top_k, top_p=top_p, seed=seed)
    naive = Naive(logits[0].numpy(), wanted, 5)
    assume(naive.filter_slack > 1e-9)
    assert draw(logits, [wanted], [5])[0].token_id == naive.token_id


@pytest.mark.parametrize(
    "wanted",
    [
        spec(),
        spec(temperature=0.7),
        spec(top_k=5),
        spec(top_p=0.8),
        spec(top_k=12, top_p=0.9),
        spec(min_p=0.2),
        spec(temperature=1.4, top_k=20, top_p=0.95, min_p=0.1),
        spec(bias={3: 2.5, 4: -3.0, 8: -100.0}),
        spec(temperature=0.6, bias={3: 1.5}, min_p=0.05),
        spec(repetition=1.5, prompt=[1, 2], output=[2, 3], temperature=1.2),
        spec(presence=1.0, frequency=0.5, prompt=[1], output=[4, 4, 4, 6], top_p=0.9),
    ],
    ids=["plain", "temperature", "top_k", "top_p", "both", "min_p", "all", "bias", "biased min_p",
         "repetition", "presence and frequency"],
)  # fmt: skip
def test_frequencies(wanted: SampleSpec) -> None:
    logits = random_logits(1, 1, 30, 1.5)
    weights = Naive(logits[0].numpy(), wanted, 0).weights
    expected = weights / weights.sum()
    count = 20_000
    drawn = draw(logits.expand(count, -1), [wanted] * count, list(range(count)))
    seen = np.bincount([token.token_id for token in drawn], minlength=30)
    assert not seen[expected == 0].any()
    kept = expected > 0
    chi_square = ((seen[kept] - count * expected[kept]) ** 2 / (count * expected[kept])).sum()
    degrees = int(kept.sum()) - 1
    assert chi_square < degrees + 5 * math.sqrt(2 * degrees)


def test_a_bad_word_is_not_completed() -> None:
    """By the output: what the prompt ended with begins nothing."""
    words = frozenset({(1,), (4, 2), (4, 4, 3), (9, 0)})
    for prompt, output, masked in (
        ([4], [], {1}),
        ([5], [4], {1, 2}),
        ([4], [4], {1, 2}),
        ([5], [4, 4], {1, 2, 3}),
        ([5], [4, 5], {1}),
        ([5], [9], {0, 1}),
    ):
        rows = torch.zeros(1, 12)
        params = SamplingParams(bad_words=words)
        history = History(array("q", [*prompt, *output]), len(prompt))
        assert params.needs_history
        edit_logits(rows, [SampleSpec(params=params, allow_stop=True, history=history)])
        assert {i for i, value in enumerate(rows[0].tolist()) if value == -math.inf} == masked
    rows, params = torch.zeros(1, 5), SamplingParams(bad_words=frozenset({(1,)}))
    assert not params.needs_history
    edit_logits(rows, [SampleSpec(params=params, allow_stop=True)])
    assert rows[0].tolist() == [0.0, -math.inf, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("vocab_size", [50, 5000])  # counted by marks, and by sorting
@pytest.mark.parametrize(("repetition", "frequency", "presence"), [(1.3, 0.25, 0.5), (1, 0.25, 0)])
def test_penalties_of_long_and_short_histories_are_the_same(
    vocab_size: int, repetition: float, frequency: float, presence: float
) -> None:
    rng = np.random.default_rng(0)
    prompt, output = (rng.integers(0, 40, size=30).tolist() for _ in range(2))
    rows = random_logits(1, 1, vocab_size, 2.0)
    expected = rows.numpy().copy()
    for token in set(prompt + output if repetition != 1 else output):
        count, score = output.count(token), expected[0, token]
        score = score / np.float32(repetition) if score > 0 else score * np.float32(repetition)
        expected[0, token] = score - np.float32(count * frequency + presence * (count > 0))
    penalised = spec(
        prompt=prompt, output=output, repetition=repetition, frequency=frequency, presence=presence
    )
    edit_logits(rows, [penalised])
    np.testing.assert_array_equal(rows.numpy(), expected)


def test_penalties_count_as_they_say() -> None:
    """Of the prompt only repetition: presence and frequency are the output's."""
    logits = torch.tensor([[2.0, 2.0, 2.0, -2.0]])

    def left(**penalties: Any) -> list[float]:
        rows = logits.clone()
        edit_logits(rows, [spec(prompt=[0, 0, 3], output=[1, 1, 1], **penalties)])
        return [float(value) for value in rows[0]]

    assert left(presence=0.5) == [2.0, 1.5, 2.0, -2.0]
    assert left(frequency=0.5) == [2.0, 0.5, 2.0, -2.0]
    assert left(repetition=2.0) == [1.0, 1.0, 2.0, -4.0]
    assert left(repetition=2.0, presence=0.25, frequency=0.5) == [1.0, -0.75, 2.0, -4.0]
    assert left(repetition=2.0, bias={0: 4.0}) == [3.0, 1.0, 2.0, -4.0]
    assert left(presence=-1.0, stop=(1,), allow_stop=False) == [2.0, -math.inf, 2.0, -2.0]


@settings(deadline=None, max_examples=40)
@given(
    wanted=st.builds(
        spec,
        temperature=st.sampled_from((0.3, 1.0, 2.5)),
        top_k=st.sampled_from((0, 3, 40)),
        top_p=st.sampled_from((1.0, 0.9, 0.4)),
        min_p=st.sampled_from((0.0, 0.05, 0.3)),
        bias=st.sampled_from((NO_BIAS, {5: 3.0, 90: -100.0})),
        repetition=st.sampled_from((1.0, 1.3, 0.7)),
        prompt=st.lists(st.integers(0, 99), min_size=1, max_size=20),
        output=st.lists(st.integers(0, 99), max_size=20),
        stop=st.sampled_from(((), (0, 3, 7))),
        allow_stop=st.booleans(),
    ),
    seed=st.integers(0, 10**6),
)
def test_the_definition_is_that_of_transformers(wanted: SampleSpec, seed: int) -> None:
    """Its own processors, in the order in which it makes them, leave the same probabilities."""
    logits = random_logits(seed, 1, 100, 2.0)
    naive = Naive(logits[0].numpy(), wanted, 0)
    assume(naive.filter_slack > 1e-6)
    history = [1] if wanted.history is None else list(wanted.history.token_ids)
    scores = logits
    for process in processors(wanted):
        scores = process(torch.tensor([history]), scores)
    expected = torch.softmax(scores[0].double(), 0).numpy()
    assert np.allclose(naive.weights / naive.weights.sum(), expected, atol=1e-6)


def processors(wanted: SampleSpec) -> list[Any]:
    """What transformers would make of these parameters."""
    params, made = wanted.params, list[Any]()
    if params.logit_bias:
        bias: Any = {(token_id,): value for token_id, value in params.logit_bias.items()}
        made.append(logits_process.SequenceBiasLogitsProcessor(bias))
    if params.repetition_penalty != 1.0:
        made.append(logits_process.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.stop_token_ids and not wanted.allow_stop:
        made.append(logits_process.SuppressTokensLogitsProcessor(sorted(params.stop_token_ids)))
    made.append(logits_process.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        made.append(logits_process.TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        made.append(logits_process.TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        made.append(logits_process.MinPLogitsWarper(params.min_p))
    return made


@pytest.mark.parametrize("backend", [CPU, PLAIN])
def test_log_probabilities_are_those_before_anything_changed_them(backend: Backend) -> None:
    logits = random_logits(3, 4, 700, 3.0)
    logits[1, 30] = logits[1, 20] = logits[1].max() + 1
    expected = torch.log_softmax(logits.double(), 1)
    changed = spec(temperature=2.0, top_k=5, bias={4: 100.0}, repetition=2.0, output=[1, 2])
    plain = SampleSpec(params=SamplingParams(temperature=0.0), allow_stop=True)
    specs = [
        replace(one, params=replace(one.params, logprobs=count))
        for one, count in ((changed, 20), (plain, 2), (changed, None), (plain, 0))
    ]
    drawn = backend.sample(logits.clone(), specs, [5] * 4)
    silent_specs = [replace(one, params=replace(one.params, logprobs=None)) for one in specs]
    unasked = backend.sample(logits.clone(), silent_specs, [5] * 4)
    for row, (token, silent) in enumerate(zip(drawn, unasked, strict=True)):
        assert isinstance(token, SampledToken)
        assert isinstance(silent, SampledToken)
        assert (token.token_id, silent.logprobs) == (silent.token_id, None)
        count = specs[row].params.logprobs
        if count is None:
            assert token.logprobs is None
            continue
        found = token.logprobs
        assert found is not None
        assert found.logprob == pytest.approx(float(expected[row, token.token_id]), abs=1e-6)
        values = expected[row].tolist()
        ranked = sorted(range(700), key=lambda i: (-values[i], i))[:count]
        assert list(found.top_token_ids) == ranked
        assert found.top_logprobs == pytest.approx([values[i] for i in ranked], abs=1e-6)
    assert isinstance(drawn[0], SampledToken)
    assert drawn[0].token_id == 4, "the bias decides, and changes no log probability"


def test_log_probabilities_of_a_tiny_vocabulary_are_all_there_are() -> None:
    wanted = SampleSpec(params=SamplingParams(temperature=0.0, logprobs=20), allow_stop=True)
    (token,) = draw(torch.tensor([[0.0, 1.0, 2.0]]), [wanted], [0])
    assert token.logprobs is not None
    assert token.logprobs.top_token_ids == (2, 1, 0)


def test_margins() -> None:
    logits = torch.log(torch.tensor([[0.25, 0.25, 0.5]]))
    for position in range(50):
        u = naive_mix(9, position)
        token = draw(logits, [spec(seed=9)], [position])[0]
        assert token.token_id == (0 if u < 0.25 else 1 if u < 0.5 else 2)
        nearest = min(abs(u - 0.25), abs(u - 0.5))
        assert token.margin == pytest.approx(nearest, abs=1e-6)
    assert draw(logits, [spec(top_k=1)], [0]) == [SampledToken(2, 1.0)]
    greedy = draw(logits, [spec(temperature=0)], [0])[0]
    assert greedy.token_id == 2
    assert greedy.margin == pytest.approx(math.log(2), abs=1e-6)
    silent = SampleSpec(params=SamplingParams(), allow_stop=True)
    assert math.isnan(draw(logits, [silent], [0])[0].margin)


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.zeros(3, 5000)
    logits[1, 4000:] = 1.0
    logits[2, 17] = 3.0
    specs = [spec(temperature=0), spec(temperature=1e-7), spec(temperature=0)]
    assert [token.token_id for token in draw(logits, specs, [0, 0, 0])] == [0, 4000, 17]


def test_stop_tokens_wait_for_min_tokens() -> None:
    logits = torch.tensor([[9.0, 8.0, 7.0]]).expand(4, -1)
    specs = [
        spec(temperature=0, stop=(0,)),
        spec(temperature=0, stop=(0,), allow_stop=False),
        spec(temperature=0.01, stop=(0, 1), allow_stop=False),
        spec(temperature=0, stop=(0, 1, 2), allow_stop=False),  # nothing else to draw
    ]
    assert [token.token_id for token in draw(logits, specs, [0] * 4)] == [0, 1, 2, 0]


def test_masked_tokens_are_never_drawn() -> None:
    """Neither at the ends of the vocabulary nor where u falls on a boundary."""
    logits = torch.full((1, 1300), float("-inf"))
    logits[0, 600:603] = 0.0
    count = 300
    for wanted in (spec(), spec(top_k=1200), spec(top_p=0.99), spec(top_k=2), spec(min_p=1e-9)):
        drawn = draw(logits.expand(count, -1), [wanted] * count, list(range(count)))
        assert {token.token_id for token in drawn} <= {600, 601, 602}


def test_min_p_keeps_all_that_are_as_likely_as_the_likeliest() -> None:
    """More of them than the filters look at first."""
    wanted, count = spec(min_p=1.0), 100
    drawn = draw(torch.zeros(1, 3000).expand(count, -1), [wanted] * count, list(range(count)))
    token_ids = [token.token_id for token in drawn]
    assert min(token_ids) < 1000
    assert max(token_ids) >= 2000
    assert len(set(token_ids)) > count // 2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_broken_logits_are_an_error_of_their_row_only(bad: float) -> None:
    logits = random_logits(1, 3, 3000, 1.0)
    specs = [spec(temperature=0), spec(top_p=0.9), spec()]
    for broken in range(3):
        spoilt = logits.clone()
        spoilt[broken, slice(None) if bad == -math.inf else 7] = bad
        drawn = sample(spoilt, specs, [1, 2, 3])
        assert isinstance(drawn[broken], LogitsError)
        assert drawn[:broken] + drawn[broken + 1 :] == [
            token for row, token in enumerate(draw(logits, specs, [1, 2, 3])) if row != broken
        ]


@pytest.mark.parametrize("backend", [CPU, PLAIN])
def test_the_largest_is_the_lowest_of_equals_on_every_backend(backend: Backend) -> None:
    """And a row that is not numbers is found, whatever else is in it."""
    logits = torch.zeros(5, 700)
    logits[1, 600] = logits[1, 130] = 2.0
    logits[2, 699] = 1.0
    logits[3] = float("-inf")
    logits[4, 5], logits[4, 9] = float("nan"), float("inf")
    spec = SampleSpec(params=SamplingParams(temperature=0.0), allow_stop=True)
    drawn = backend.sample(logits, [spec] * 5, [7] * 5)
    tokens = [token.token_id for token in drawn if isinstance(token, SampledToken)]
    assert tokens == [0, 130, 699]
    assert all(isinstance(error, LogitsError) for error in drawn[3:])


def test_wide_rows_of_equal_logits() -> None:
    """All in one bin, zeros of both signs among them."""
    logits = torch.zeros(1, 5000)
    logits[0, ::2] = -0.0
    drawn = draw(logits.expand(300, -1), [spec(top_k=2000, top_p=0.75)] * 300, list(range(300)))
    ids = [token.token_id for token in drawn]
    assert max(ids) < 1500
    assert len({token_id // 300 for token_id in ids}) == 5

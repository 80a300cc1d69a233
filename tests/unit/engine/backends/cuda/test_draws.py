"""The sampler on a device, interpreted, draws what the host's draws."""

from tests.triton_interpreter import INTERPRETED

# isort: split
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diptych.engine.backends.cuda import sampler
from diptych.engine.sampling.logit_edits import Unseen
from diptych.engine.sampling.sampler import mix, sample
from diptych.engine.scheduling.step import SampledToken, SampleSpec
from diptych.errors import LogitsError
from diptych.sampling_params import SamplingParams
from tests.naive_sampler import Naive
from tests.sampling_cases import SPECS, random_logits, spec

GREEDY = spec(temperature=0.0)


def tokens_of(drawn: list[SampledToken | LogitsError]) -> list[SampledToken]:
    tokens = [token for token in drawn if isinstance(token, SampledToken)]
    assert len(tokens) == len(drawn)
    return tokens


@settings(deadline=None, max_examples=8)
@given(
    specs=st.lists(SPECS, min_size=1, max_size=4),
    seed=st.integers(0, 10**6),
    vocab_size=st.sampled_from((101, 512, 513, 1025)),
    part_size=st.sampled_from((512, 2048)),
    spread=st.sampled_from((0.0, 2.0, 12.0)),
    position=st.integers(0, 10**6),
)
@example(  # every kind of row in one batch, and both filters after each other
    specs=[
        GREEDY, spec(), spec(top_k=40), spec(top_p=0.9), spec(top_k=600, top_p=0.8, min_p=0.05),
        spec(min_p=0.2, bias={5: 3.0}), spec(top_k=3, repetition=1.3, output=[1, 2]),
    ],
    seed=3, vocab_size=1025, part_size=512, spread=2.0, position=2**31,
)  # fmt: skip
def test_tokens_are_the_hosts(
    specs: list[SampleSpec],
    seed: int,
    vocab_size: int,
    part_size: int,
    spread: float,
    position: int,
) -> None:
    """Greedy ones and their margins exactly; the others where they are not at a boundary."""
    logits = random_logits(seed, len(specs), vocab_size, spread)
    positions = [position + row for row in range(len(specs))]
    wanted = tokens_of(sample(logits.clone(), specs, positions))
    drawn = tokens_of(sampler.sample(logits.clone(), specs, positions, part_size))
    for row, (token, other) in enumerate(zip(drawn, wanted, strict=True)):
        if specs[row].params.temperature == 0:
            assert token == other
            continue
        naive = Naive(logits[row].numpy(), specs[row], positions[row])
        assert naive.weights[token.token_id] > 0 or naive.filter_slack < 1e-6
        if other.margin > 1e-6 and naive.filter_slack > 1e-6:
            assert token.token_id == other.token_id
            assert token.margin == pytest.approx(other.margin, abs=1e-6)


@settings(deadline=None, max_examples=5)
@given(
    levels=st.lists(st.integers(0, 3), min_size=2, max_size=700),
    top_k=st.integers(1, 700),
    top_p=st.sampled_from((1.0, 0.7)),
    seed=st.integers(0, 1000),
)
@example(levels=[0] * 600 + [1] * 50, top_k=640, top_p=0.7, seed=1)
def test_equal_logits_rank_by_id(levels: list[int], top_k: int, top_p: float, seed: int) -> None:
    logits = torch.tensor([levels], dtype=torch.float32)
    logits[0, ::2] *= -1.0 if max(levels) == 0 else 1.0  # zeros of both signs
    specs = [spec(top_k=top_k, top_p=top_p, seed=seed)]
    (wanted,) = tokens_of(sample(logits.clone(), specs, [5]))
    (token,) = tokens_of(sampler.sample(logits.clone(), specs, [5], 512))
    naive = Naive(logits[0].numpy(), specs[0], 5)
    if wanted.margin > 1e-9 and naive.filter_slack > 1e-9:
        assert token.token_id == wanted.token_id


def test_the_draw_is_by_the_documented_hash() -> None:
    """Of equal logits, as many as are told apart: the number itself."""
    seeds, positions = [0, 42, 2**63, 2**64 - 1], [7, 7, 0, 2**40]
    specs = [spec(seed=seed) for seed in seeds]
    drawn = tokens_of(sampler.sample(torch.zeros(4, 4096), specs, positions))
    assert [each.token_id for each in drawn] == [int(u * 4096) for u in mix(seeds, positions)]


def test_a_row_depends_on_no_other() -> None:
    specs = [spec(top_p=0.9, seed=4), GREEDY, spec(seed=5)]
    logits = random_logits(1, 3, 700, 2.0)
    drawn = sampler.sample(logits.clone(), specs, [9] * 3, 512)
    for row in range(3):
        assert sampler.sample(logits[row : row + 1].clone(), [specs[row]], [9], 512) == [drawn[row]]


def test_broken_logits_are_an_error_of_their_row_only() -> None:
    specs = [GREEDY, spec(top_p=0.9), spec()]
    logits = random_logits(1, 3, 600, 1.0)
    whole = sampler.sample(logits.clone(), specs, [1, 2, 3], 512)
    for broken, bad in enumerate((math.nan, math.inf, -math.inf)):
        spoilt = logits.clone()
        spoilt[broken, slice(None) if bad == -math.inf else 7] = bad
        drawn = sampler.sample(spoilt, specs, [1, 2, 3], 512)
        assert isinstance(drawn[broken], LogitsError)
        assert drawn[:broken] + drawn[broken + 1 :] == whole[:broken] + whole[broken + 1 :]


def test_masked_tokens_are_never_drawn() -> None:
    """Neither at the ends of the vocabulary nor where the number falls on a boundary."""
    logits = torch.full((8, 700), float("-inf"))
    logits[:, 600:603] = 0.0
    for wanted in (spec(), spec(min_p=1e-9), spec(top_k=650), spec(top_p=0.99)):
        count = 2 if wanted.params.top_k or wanted.params.top_p < 1 else 8
        drawn = tokens_of(
            sampler.sample(logits[:count].clone(), [wanted] * count, list(range(count)), 512)
        )
        assert {token.token_id for token in drawn} <= {600, 601, 602}


def test_the_backend_draws_with_it_and_tells_log_probabilities() -> None:
    logits = random_logits(3, 2, 700, 3.0)
    expected = torch.log_softmax(logits.double(), 1)
    specs = [
        replace(one, params=replace(one.params, logprobs=count, return_margins=False))
        for one, count in ((spec(bias={4: 100.0}), 20), (GREEDY, None))
    ]
    first, second = tokens_of(INTERPRETED.sample(logits.clone(), specs, [5, 6]))
    assert math.isnan(first.margin)
    assert first.token_id == 4
    assert first.logprobs is not None
    assert first.logprobs.logprob == pytest.approx(float(expected[0, 4]), abs=1e-6)
    assert first.logprobs.top_token_ids[0] == int(expected[0].argmax())
    assert len(first.logprobs.top_token_ids) == 20
    assert (second.token_id, second.logprobs) == (int(expected[1].argmax()), None)


def test_ahead_of_a_token_that_the_host_does_not_have_it_draws_the_same() -> None:
    logits = random_logits(3, 3, 700, 0.5)
    whole = [
        spec(temperature=0.0, repetition=9.0, frequency=1.0, output=[4, 5, 4]),
        spec(presence=2.0, output=[4, 9], seed=3),
        spec(temperature=0.0, bias={4: 100.0}),
    ]
    whole = [
        replace(one, params=replace(one.params, logprobs=1, return_margins=False)) for one in whole
    ]
    lacking = [
        replace(
            one, history=one.history and one.history._replace(token_ids=one.history.token_ids[:-1])
        )
        for one in whole
    ]
    unseen = Unseen([0, 1], torch.tensor([4, 9]))
    expected = tokens_of(INTERPRETED.sample(logits.clone(), whole, [5, 6, 7]))
    drawn = tokens_of(INTERPRETED.draw(logits.clone(), lacking, [5, 6, 7], unseen).tell())
    assert [repr(token) for token in drawn] == [repr(token) for token in expected]


def test_one_token_alone() -> None:
    greedy, drawn = tokens_of(sampler.sample(torch.zeros(2, 1), [GREEDY, spec()], [0, 0]))
    assert (greedy.token_id, greedy.margin, drawn.token_id) == (0, math.inf, 0)


def test_parameters_that_are_at_their_edges() -> None:
    logits = random_logits(4, 3, 300, 1.0)
    params = [
        SamplingParams(top_p=math.nextafter(1.0, 0.0), seed=1, return_margins=True),
        SamplingParams(top_p=1e-12, seed=2, return_margins=True),
        SamplingParams(min_p=1.0, temperature=1e-5, seed=3, return_margins=True),
    ]
    specs = [SampleSpec(params=each, allow_stop=True) for each in params]
    wanted = sample(logits.clone(), specs, [0, 1, 2])
    drawn = sampler.sample(logits.clone(), specs, [0, 1, 2], 512)
    assert [each.token_id for each in tokens_of(drawn)] == [
        each.token_id for each in tokens_of(wanted)
    ]

"""Rows of logits and how a token of each is to be drawn, for tests of samplers."""

from array import array
from collections.abc import Mapping, Sequence

import hypothesis.strategies as st
import numpy as np
import torch

from diptych.engine.scheduling.step import History, SampleSpec
from diptych.sampling_params import SamplingParams

NO_BIAS: Mapping[int, float] = {}


def spec(
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    bias: Mapping[int, float] = NO_BIAS,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    seed: int = 0,
    stop: Sequence[int] = (),
    allow_stop: bool = True,
) -> SampleSpec:
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        logit_bias=bias,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        seed=seed,
        stop_token_ids=frozenset(stop),
        return_margins=True,
    )
    history = History(array("q", [*prompt, *output]), len(prompt))
    return SampleSpec(
        params=params, allow_stop=allow_stop, history=history if params.needs_history else None
    )


def random_logits(seed: int, rows: int, vocab_size: int, spread: float) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy((rng.standard_normal((rows, vocab_size)) * spread).astype(np.float32))


SPECS = st.builds(
    spec,
    temperature=st.sampled_from((0.0, 0.05, 0.5, 1.0, 1.7, 10.0)),
    top_k=st.sampled_from((0, 1, 2, 40, 1023, 1024, 1500, 10**6)),
    top_p=st.sampled_from((1.0, 0.999, 0.9, 0.5, 1e-6)),
    min_p=st.sampled_from((0.0, 0.0, 1e-4, 0.05, 0.6, 1.0)),
    bias=st.sampled_from((NO_BIAS, NO_BIAS, {5: 3.0, 100: -100.0}, {7: 100.0}, {0: 0.25, 1: -1})),
    repetition=st.sampled_from((1.0, 1.0, 1.3, 0.5, 100.0)),
    presence=st.sampled_from((0.0, 0.0, 1.5, -2.0)),
    frequency=st.sampled_from((0.0, 0.0, 0.25, -0.5)),
    prompt=st.lists(st.integers(0, 100), max_size=20),
    output=st.lists(st.integers(0, 9) | st.integers(0, 100), max_size=20),
    seed=st.integers(0, 2**64 - 1),
    stop=st.sampled_from(((), (1,), (0, 3, 10**9), tuple(range(100)))),
    allow_stop=st.booleans(),
)

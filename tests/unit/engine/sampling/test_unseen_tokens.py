"""A token that the device alone has counts as one that the history has, bit for bit."""

from array import array
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import given, settings

from diptych.engine.sampling.device_draws import DeviceDraws
from diptych.engine.sampling.logit_edits import Unseen, edit_logits
from diptych.engine.sampling.sampler import sample
from diptych.engine.scheduling.step import History, SampleSpec
from tests.sampling_cases import SPECS, random_logits
from tests.seen_by_nobody import SeenByNobody

WORDS = st.frozensets(
    st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6
)


def seen_and_not(
    specs: list[SampleSpec], outputs: list[list[int]]
) -> tuple[list[SampleSpec], list[SampleSpec], Unseen]:
    """With whole histories, and without the last token of those that have an output."""
    whole, lacking, rows = [], [], []
    for row, (spec, output) in enumerate(zip(specs, outputs, strict=True)):
        if not spec.params.needs_history:
            whole.append(spec)
            lacking.append(spec)
            continue
        prompt = [2, 3, 90]
        histories = [History(array("q", prompt + part), 3) for part in (output, output[:-1])]
        whole.append(replace(spec, history=histories[0]))
        lacking.append(replace(spec, history=histories[1]))
        if output:
            rows.append(row)
    last = torch.tensor([outputs[row][-1] for row in rows], dtype=torch.int64)
    return whole, lacking, Unseen(rows, last)


@settings(deadline=None, max_examples=150)
@given(st.data(), st.integers(0, 2**32 - 1))
def test_edits_are_the_same(data: st.DataObject, seed: int) -> None:
    specs = data.draw(st.lists(SPECS, min_size=1, max_size=5))
    for row, spec in enumerate(specs):
        words = data.draw(st.none() | WORDS)
        if words is not None:
            specs[row] = replace(spec, params=replace(spec.params, bad_words=words))
    outputs = [data.draw(st.lists(st.integers(0, 4), max_size=6)) for _ in specs]
    whole, lacking, unseen = seen_and_not(specs, outputs)
    expected, found = (random_logits(seed, len(specs), 128, 5.0) for _ in range(2))
    edit_logits(expected, whole)
    edit_logits(found, lacking, unseen)
    assert np.array_equal(found.numpy().view(np.int32), expected.numpy().view(np.int32))
    if unseen.rows:
        edit_logits(found := random_logits(seed, len(specs), 128, 5.0), whole)
        assert torch.equal(found, expected), "without such tokens nothing is different"


@settings(deadline=None, max_examples=40)
@given(st.lists(SPECS, min_size=1, max_size=4), st.integers(0, 2**32 - 1), st.data())
def test_a_device_draws_and_tells_what_the_host_would(
    specs: list[SampleSpec], seed: int, data: st.DataObject
) -> None:
    specs = [
        replace(
            spec,
            params=replace(
                spec.params,
                return_margins=False,
                top_k=0,
                top_p=1.0,
                logprobs=data.draw(st.sampled_from([None, 0, 2, 20])),
            ),
        )
        for spec in specs
    ]
    outputs = [data.draw(st.lists(st.integers(0, 4), max_size=6)) for _ in specs]
    whole, lacking, unseen = seen_and_not(specs, outputs)
    positions = [7] * len(specs)
    expected = sample(random_logits(seed, len(specs), 600, 3.0), whole, positions)
    logits = random_logits(seed, len(specs), 600, 3.0)
    with SeenByNobody():  # type: ignore[no-untyped-call]
        drawn = DeviceDraws.of(logits, lacking, positions, unseen)
    for token, other in zip(drawn.tell(), expected, strict=True):
        assert repr(token) == repr(other)  # margins are NaN in both

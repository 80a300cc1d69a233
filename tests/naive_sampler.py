"""How a token is drawn, by the definition alone: slow, in float64, one token at a time."""

import math
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from diptych.engine.scheduling.step import SampleSpec


def naive_mix(seed: int, position: int, stream: int = 0) -> float:
    """A uniform in [0, 1)."""
    mask = 2**64 - 1

    def finalise(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    state = finalise((seed + 0x9E3779B97F4A7C15) & mask)
    for word in (position, stream):
        state = finalise(((state ^ word) + 0x9E3779B97F4A7C15) & mask)
    return (state >> 11) / 2**53


def edited(logits: NDArray[np.float32], spec: SampleSpec) -> NDArray[np.float64]:
    """The logits with bias, penalties and mask."""
    params, history, biased = spec.params, spec.history, logits.copy()
    output = [] if history is None else list(history.token_ids[history.num_prompt_tokens :])
    for *begin, last in params.bad_words:
        if not begin or output[-len(begin) :] == begin:
            biased[last] = -np.inf
    for token_id, bias in params.logit_bias.items():
        biased[token_id] += np.float32(bias)
    values = biased.astype(np.float64)
    if history is not None:
        for token_id in set(history.token_ids):
            score, penalty = values[token_id], params.repetition_penalty
            values[token_id] = score / penalty if score > 0 else score * penalty
        for token_id, count in Counter(output).items():
            values[token_id] -= count * params.frequency_penalty + params.presence_penalty
    if not spec.allow_stop:
        values[[i for i in params.stop_token_ids if i < len(values)]] = -np.inf
    return values


class Naive:
    """One draw, with everything sorted.

    ``margin``: how near it is to being another token. ``filter_slack``: how near the set
    of tokens that pass the filters is to being another one.
    """

    def __init__(self, logits: NDArray[np.float32], spec: SampleSpec, position: int) -> None:
        params = spec.params
        values = edited(logits, spec)
        ranked = sorted(range(len(values)), key=lambda i: (-values[i], i))
        self.weights = np.zeros(len(values))
        self.filter_slack = math.inf
        if params.temperature == 0:
            self.weights[ranked[0]] = 1.0
            self.token_id = ranked[0]
            self.margin = float(values[ranked[0]] - values[ranked[1]])
            return
        scaled = np.exp((values - values.max()) / params.temperature)
        kept = ranked[: params.top_k or len(ranked)]
        if len(kept) < len(ranked):
            last, next_ = values[kept[-1]], values[ranked[len(kept)]]
            if last > next_:  # equals rank by id
                self.filter_slack = last - next_
        total, reached = math.fsum(scaled[kept]), 0.0
        least = params.min_p * scaled.max()
        for token_id in kept:
            if params.top_p < 1:
                slack = abs(reached - params.top_p * total) / total
                self.filter_slack = min(self.filter_slack, slack)
            if reached >= params.top_p * total and params.top_p < 1:
                break
            reached += scaled[token_id]
            if params.min_p > 0 and scaled[token_id] < scaled.max():
                self.filter_slack = min(self.filter_slack, abs(scaled[token_id] - least))
            if scaled[token_id] >= least:
                self.weights[token_id] = scaled[token_id]
        ends = np.cumsum(self.weights) / self.weights.sum()
        u = naive_mix(params.seed, position)
        self.token_id = int(np.argmax(ends > u))
        self.margin = float(np.abs(ends - u).min())

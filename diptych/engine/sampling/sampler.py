"""Draws tokens: a pure function of logits, parameters, the tokens so far and position.

Nothing is remembered between calls, so any worker draws the same token. For the
token at position ``p`` of a sequence with seed ``s``::

    u = mix(s, p, stream=0)                       # in [0, 1), exact integers
    weights = exp((logits - max) / temperature)   # of the tokens that pass the filters
    token = first id whose cumulative weight, in order of ids, exceeds u * total

In this order, which is that of vLLM and transformers: what a constraint does not allow is
masked; what would complete one of ``bad_words`` is masked; ``logit_bias`` is added; the
penalties of repetition (of prompt and output), frequency and presence (of the output) are
applied; stop tokens before
``min_tokens`` are masked; temperature; ``top_k`` keeps the k most likely; ``top_p``
keeps, of those, the shortest run of the most likely whose share of the weight reaches
p; ``min_p`` keeps, of those, the tokens with at least that part of the likeliest one's
weight (as in transformers: vLLM asks for it before top_k and top_p). Equal logits rank
by lower id. Temperature 0 (or below 1e-5) is greedy: the lowest id of the largest
logit. Log probabilities, where asked for, are of the logits before all that: vLLM's raw
ones. Rows do not influence each other. Runs on the model thread.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor

from diptych.engine.sampling.logit_edits import edit_logits
from diptych.engine.sampling.ranking import ranked
from diptych.engine.sampling.raw_logprobs import RawLogits
from diptych.engine.scheduling.run_ahead import GREEDY_BELOW
from diptych.engine.scheduling.step import SampledToken, SampleSpec
from diptych.errors import LogitsError

_NUM_CANDIDATES = 1024  # most likely tokens a filter looks at first
_BLOCK = 512  # ids per partial sum
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]


class Largest(NamedTuple):
    """Of each row of logits."""

    token_ids: _Ints  # [R], the lowest that has it
    logits: Tensor  # [R, 1]; a NaN is the largest of all


def find_largest(logits: Tensor) -> Largest:
    """Anywhere. logits: [R, vocab_size]."""
    best = logits.amax(dim=1, keepdim=True)
    vocab_size = logits.shape[1]
    ids = torch.arange(vocab_size, device=logits.device)
    # What torch's argmax gives among equals is not said, and NaN equals nothing.
    first = ids.where(logits == best, vocab_size - 1).amin(dim=1)
    return Largest(first.cpu().numpy(), best)


def sample(
    logits: Tensor,
    specs: Sequence[SampleSpec],
    positions: Sequence[int],
    find_largest: Callable[[Tensor], Largest] = find_largest,
) -> list[SampledToken | LogitsError]:
    """Draw one token per row; an error where the row has no finite largest logit.

    Args:
        logits: [R, vocab_size] float32; changed in place.
        specs: of each row.
        positions: of each token to draw, counted from the prompt's first.
        find_largest: how that is found fastest where the logits are.
    """
    raw = RawLogits.of(logits, specs)
    edit_logits(logits, specs)
    token_ids, best = find_largest(logits)
    broken = np.flatnonzero(~torch.isfinite(best[:, 0]).cpu().numpy())
    logits[broken], best[broken] = 0.0, 0.0  # to be drawn from, in vain
    batch = _Batch.of(logits, best, specs, positions)
    margins = np.full(len(specs), np.nan)

    greedy = np.flatnonzero(batch.greedy & batch.wants_margin)
    if len(greedy):
        margins[greedy] = _greedy_margins(batch.take(greedy).logits)
    plain = np.flatnonzero(~batch.greedy & ~batch.filtered)
    if len(plain):
        token_ids[plain], margins[plain] = _draw_plain(batch.take(plain))
    filtered = np.flatnonzero(~batch.greedy & batch.filtered)
    if len(filtered):
        draw, decided = _draw_narrow(batch.take(filtered))
        rows, wide = filtered[decided], filtered[~decided]
        token_ids[rows], margins[rows] = draw.token_ids[decided], draw.margins[decided]
        if len(wide):
            token_ids[wide], margins[wide] = _draw_wide(batch.take(wide))

    margins[~batch.wants_margin] = np.nan
    tokens = list(map(SampledToken, token_ids.tolist(), margins.tolist()))
    if raw is not None:
        raw.add_to(tokens)
    drawn: list[SampledToken | LogitsError] = list(tokens)
    for row in broken:
        drawn[row] = LogitsError("the model's logits for this sequence are not numbers")
    return drawn


def mix(seeds: Sequence[int], positions: Sequence[int], stream: int = 0) -> _Floats:
    """One uniform in [0, 1) per row, the same bits on every machine.

    Three rounds of the splitmix64 finaliser (Steele, Lea and Flood 2014) absorb
    seed, position and stream, 64 bits each; the top 53 bits of the last make the
    number. ``stream`` keeps independent draws at one position apart.
    """
    state = _finalise(np.array(seeds, np.uint64) + _GOLDEN)
    state = _finalise((state ^ np.array(positions, np.uint64)) + _GOLDEN)
    state = _finalise((state ^ np.uint64(stream)) + _GOLDEN)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _finalise(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class _Batch(NamedTuple):
    """Rows and their parameters, in arrays of one entry per row."""

    logits: Tensor  # [R, vocab_size] float32
    best: Tensor  # [R, 1] largest logit
    temperatures: _Floats
    top_ks: _Ints  # vocab_size where all
    top_ps: _Floats
    min_ps: _Floats
    uniforms: _Floats
    wants_margin: NDArray[np.bool_]

    @classmethod
    def of(
        cls, logits: Tensor, best: Tensor, specs: Sequence[SampleSpec], positions: Sequence[int]
    ) -> "_Batch":
        params = [spec.params for spec in specs]
        vocab_size = logits.shape[1]
        return cls(
            logits=logits,
            best=best,
            temperatures=np.array([p.temperature for p in params]),
            top_ks=np.array([min(p.top_k or vocab_size, vocab_size) for p in params]),
            top_ps=np.array([p.top_p for p in params]),
            min_ps=np.array([p.min_p for p in params]),
            uniforms=mix([p.seed for p in params], positions),
            wants_margin=np.array([p.return_margins for p in params]),
        )

    @property
    def greedy(self) -> NDArray[np.bool_]:
        return self.temperatures < GREEDY_BELOW

    @property
    def filtered(self) -> NDArray[np.bool_]:
        is_cut = (self.top_ks < self.logits.shape[1]) | (self.top_ps < 1.0)
        return is_cut | (self.min_ps > 0.0)

    def take(self, rows: _Ints) -> "_Batch":
        if len(rows) == len(self.uniforms):
            return self
        index = torch.from_numpy(rows).to(self.logits.device)
        return _Batch(
            self.logits.index_select(0, index),
            self.best.index_select(0, index),
            self.temperatures[rows],
            self.top_ks[rows],
            self.top_ps[rows],
            self.min_ps[rows],
            self.uniforms[rows],
            self.wants_margin[rows],
        )

    def weights(self) -> Tensor:
        """Of all tokens, unfiltered: [R, vocab_size] float32."""
        scale = torch.from_numpy(self.temperatures).to(self.logits)[:, None]
        return (self.logits - self.best).div_(scale).exp_()


class _Draw(NamedTuple):
    """Outcome per row."""

    token_ids: _Ints
    margins: _Floats


def _greedy_margins(logits: Tensor) -> _Floats:
    if logits.shape[1] < 2:
        return np.full(len(logits), np.inf)
    top = torch.topk(logits, 2).values.double().cpu().numpy()
    margins: _Floats = top[:, 0] - top[:, 1]
    return margins


def _draw_plain(batch: _Batch) -> _Draw:
    return _invert_all(batch.weights(), batch.uniforms)


def _draw_wide(batch: _Batch) -> _Draw:
    """Inverse CDF over what the filters leave, however much that is."""
    weights = batch.weights()
    for row, (values, everything) in enumerate(zip(batch.logits, weights, strict=True)):
        weighed = everything.cpu().numpy()
        kept = _kept(values.cpu().numpy(), weighed, batch.top_ks[row], batch.top_ps[row])
        kept &= weighed >= batch.min_ps[row]
        everything.masked_fill_(torch.from_numpy(~kept).to(everything.device), 0.0)
    return _invert_all(weights, batch.uniforms)


def _kept(
    values: NDArray[np.float32], weights: NDArray[np.float32], top_k: int, top_p: float
) -> NDArray[np.bool_]:
    """Which tokens pass top_k and top_p. Sorts only those near an edge of what is kept."""
    bits = (values + np.float32(0.0)).view(np.int32)  # -0.0 and 0.0 are equal
    # The upper half of the bits that a value has: rises with it.
    bins = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> 16) + 0x8000

    def shortest_run(weights: _Floats, wanted: float) -> NDArray[np.bool_]:
        """The most likely tokens until their weights reach what is wanted."""
        sums = np.bincount(bins, weights, 0x10000)
        ends = np.cumsum(sums[::-1])
        rank = min(int(np.searchsorted(ends, wanted)), 0xFFFF)
        edge = 0xFFFF - rank
        ids = np.flatnonzero(bins == edge)
        ids = ids[np.argsort(-values[ids], kind="stable")]
        before = (ends[rank] - sums[edge]) + np.cumsum(weights[ids]) - weights[ids]
        kept = bins > edge
        kept[ids[before < wanted]] = True
        return kept

    shares = weights.astype(np.float64)
    kept = np.ones(len(values), np.bool_)
    if top_k < len(values):
        kept = shortest_run(np.ones(len(values)), top_k)
        shares[~kept] = 0.0
    if top_p < 1.0:
        kept &= shortest_run(shares, top_p * shares.sum())
    return kept


def _invert_all(weights: Tensor, uniforms: _Floats) -> _Draw:
    """Inverse CDF over the whole vocabulary, by partial sums of blocks of ids."""
    weights = F.pad(weights, (0, -weights.shape[1] % _BLOCK)).view(len(weights), -1, _BLOCK)
    sums = weights.sum(-1, dtype=torch.float64).cpu().numpy()  # [R, num_blocks]
    ends = np.cumsum(sums, axis=1)
    targets = uniforms * ends[:, -1]
    blocks = np.minimum((ends <= targets[:, None]).sum(1), _last_positive(sums))
    rows = np.arange(len(blocks))
    inside = weights[torch.from_numpy(rows), torch.from_numpy(blocks)].double().cpu().numpy()
    # The block's own cumulative sum, between what lies before it and after it.
    before, after = ends[rows, blocks] - sums[rows, blocks], ends[:, -1] - ends[rows, blocks]
    draw = _invert(np.column_stack((before, inside, after)), targets, first=1, last=_BLOCK)
    return _Draw(blocks * _BLOCK + draw.token_ids - 1, draw.margins)


def _draw_narrow(batch: _Batch) -> tuple[_Draw, NDArray[np.bool_]]:
    """Inverse CDF over what the filters leave, looking at the most likely tokens only.

    The second result says for which rows that was enough.
    """
    vocab_size = batch.logits.shape[1]
    num_candidates = min(_NUM_CANDIDATES, vocab_size)
    values, ids = ranked(batch.logits, num_candidates)
    weights = np.exp((values - values[:, :1]) / batch.temperatures[:, None])
    ranks = np.arange(num_candidates)
    weights[ranks >= batch.top_ks[:, None]] = 0.0
    ends = np.cumsum(weights, axis=1)
    totals = ends[:, -1]
    if num_candidates < vocab_size and (batch.top_ks > num_candidates).any():
        everything = batch.weights().sum(-1, dtype=torch.float64).cpu().numpy()
        totals = np.where(batch.top_ks > num_candidates, everything, totals)
    wanted = np.where(batch.top_ps < 1.0, batch.top_ps * totals, np.inf)
    num_kept = np.maximum((ends - weights < wanted[:, None]).sum(1), 1)
    num_kept = np.minimum(num_kept, batch.top_ks)
    num_kept = np.minimum(num_kept, (weights >= batch.min_ps[:, None]).sum(1))
    # Equal logits beyond the candidates may rank before those kept, and top_p's share is
    # of what top_k keeps, which may reach beyond the candidates without being everything.
    edge = values[np.arange(len(values)), num_kept - 1]
    whole = (batch.top_ks <= num_candidates) | (batch.top_ks == vocab_size)
    everything_seen = (num_candidates == vocab_size) | np.isneginf(values[:, -1])
    decided = everything_seen | ((edge > values[:, -1]) & whole)

    weights[ranks >= num_kept[:, None]] = 0.0
    width = int(num_kept.max())
    order = np.argsort(ids[:, :width], axis=1)
    ids = np.take_along_axis(ids[:, :width], order, 1)
    weights = np.take_along_axis(weights[:, :width], order, 1)
    draw = _invert(weights, batch.uniforms * weights.sum(1), first=0, last=width - 1)
    return _Draw(np.take_along_axis(ids, draw.token_ids[:, None], 1)[:, 0], draw.margins), decided


def _invert(weights: _Floats, targets: _Floats, *, first: int, last: int) -> _Draw:
    """The column of each row in which ``targets`` falls, kept within first to last.

    weights: [R, n] >= 0. A column without weight is never drawn.
    """
    ends = np.cumsum(weights, axis=1)
    columns = (ends <= targets[:, None]).sum(1)
    # Rounding may put a target at the very end, or a hair outside first to last.
    positive = weights > 0
    positive[:, :first] = positive[:, last + 1 :] = False
    columns = np.maximum(columns, np.argmax(positive, axis=1))
    columns = np.minimum(columns, _last_positive(positive))
    rows = np.arange(len(columns))
    above = ends[rows, columns]
    below = above - weights[rows, columns]
    total = ends[:, -1]
    # An end of the whole line is no boundary: there is nothing on the other side.
    to_lower = np.where(below > 0, targets - below, total)
    to_upper = np.where(above < total, above - targets, total)
    return _Draw(columns, np.maximum(np.minimum(to_lower, to_upper) / total, 0.0))


def _last_positive(weights: NDArray[np.float64] | NDArray[np.bool_]) -> _Ints:
    columns: _Ints = weights.shape[1] - 1 - np.argmax(weights[:, ::-1] > 0, axis=1)
    return columns

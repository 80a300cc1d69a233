"""Tokens that a device draws by itself, so that its next step can go on from them. Model thread.

The rule is the sampler's (:mod:`diptych.engine.sampling.sampler`) for rows that the host need not
see (:mod:`diptych.engine.scheduling.run_ahead`). Where numbers are added up in another order than
the host's, a draw at the very boundary may differ. Nothing here waits for the device.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from diptych.engine.device_copies import on_device, on_host
from diptych.engine.sampling.logit_edits import Unseen, edit_logits
from diptych.engine.sampling.raw_logprobs import AskedLogprobs, RawLogits
from diptych.engine.sampling.sampler import mix
from diptych.engine.scheduling.run_ahead import GREEDY_BELOW
from diptych.engine.scheduling.step import SampledToken, SampleSpec
from diptych.errors import LogitsError
from diptych.sampling_params import SamplingParams

_BLOCK = 512  # ids per partial sum, as the sampler's


class DeviceDraws(NamedTuple):
    """One token for each of R rows."""

    token_ids: Tensor  # [R] int64, on the device; any id where logits are no numbers
    told: Tensor  # [R, 2] int64, on the host: the same, and whether logits are numbers
    asked: dict[int, int]  # rows that ask for log probabilities, by their order in those
    logprobs: AskedLogprobs | None  # of these rows

    @classmethod
    def of(
        cls,
        logits: Tensor,
        specs: Sequence[SampleSpec],
        positions: Sequence[int],
        unseen: Unseen | None = None,
    ) -> Self:
        """By torch's operators. logits: [R, vocab_size] float32, contiguous; changed in place.

        positions: of the tokens. unseen: of rows whose history lacks its last one.
        """
        raw = RawLogits.of(logits, specs)
        edit_logits(logits, specs, unseen)
        best = logits.amax(dim=1, keepdim=True)
        vocab_size = logits.shape[1]
        ids = torch.arange(vocab_size, device=logits.device)
        token_ids = ids.where(logits == best, vocab_size - 1).amin(dim=1)
        temperatures = np.array([spec.params.temperature for spec in specs])
        rows = np.flatnonzero(temperatures >= GREEDY_BELOW)
        if len(rows):
            params = [specs[row].params for row in rows.tolist()]
            uniforms = mix([spec.params.seed for spec in specs], positions)[rows]
            index = on_device(rows, logits.device)
            drawn = logits.index_select(0, index)
            scale = on_device(temperatures[rows], logits.device).to(logits.dtype)[:, None]
            weights = (drawn - best.index_select(0, index)).div_(scale).exp_()
            if any(p.top_k or p.top_p < 1.0 or p.min_p for p in params):
                weights = _filtered(drawn, weights, params)
            token_ids.index_copy_(0, index, _draw(weights, on_device(uniforms, logits.device)))
        return cls.told_of(token_ids, torch.isfinite(best[:, 0]), raw)

    @classmethod
    def told_of(cls, token_ids: Tensor, is_number: Tensor, raw: RawLogits | None) -> Self:
        """token_ids: [R] int64, is_number: [R] bool; on the device."""
        told = on_host(torch.stack((token_ids, is_number.long()), dim=1))
        if raw is None:
            return cls(token_ids, told, {}, None)
        return cls(
            token_ids, told, {row: at for at, row in enumerate(raw.rows)}, raw.ask(token_ids)
        )

    def tell(self) -> list[SampledToken | LogitsError]:
        """Once the device has done all that it was asked for here."""
        logprobs = [] if self.logprobs is None else self.logprobs.tell()
        return [
            SampledToken(
                token_id, float("nan"), logprobs[self.asked[row]] if row in self.asked else None
            )
            if is_number
            else LogitsError("the model's logits for this sequence are not numbers")
            for row, (token_id, is_number) in enumerate(self.told.tolist())
        ]


def _filtered(logits: Tensor, weights: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The weights of what top_k, then top_p, then min_p keep; of others 0. [R, vocab_size]."""
    vocab_size = logits.shape[1]
    limits = [(p.top_k or vocab_size, p.top_p if p.top_p < 1.0 else 2.0, p.min_p) for p in params]
    top_ks, top_ps, min_ps = on_device(np.array(limits), logits.device).T[:, :, None]
    order = torch.sort(logits, dim=1, descending=True, stable=True).indices
    ranked = weights.gather(1, order)
    shares = ranked.double()
    is_kept = torch.arange(vocab_size, device=logits.device) < top_ks
    shares = shares.where(is_kept, 0.0)
    ends = shares.cumsum(1)
    is_kept &= (ends - shares < top_ps * ends[:, -1:]) & (shares >= min_ps)
    return torch.zeros_like(weights).scatter_(1, order, ranked.where(is_kept, 0.0))


def _draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse CDF over the whole vocabulary, by partial sums of blocks of ids.

    weights: [R, vocab_size] float32; uniforms: [R] float64 -> [R].
    """
    vocab_size = weights.shape[1]
    weights = F.pad(weights, (0, -vocab_size % _BLOCK)).view(len(weights), -1, _BLOCK)
    sums = weights.sum(-1, dtype=torch.float64)  # [R, num_blocks]
    ends = sums.cumsum(1)
    targets = (uniforms * ends[:, -1])[:, None]
    blocks = torch.minimum((ends <= targets).sum(1), _last_positive(sums))[:, None]
    before = ends.gather(1, blocks) - sums.gather(1, blocks)
    inside = weights.gather(1, blocks[:, :, None].expand(-1, -1, _BLOCK))[:, 0].double()
    columns = (torch.cat((before, inside), dim=1).cumsum(1)[:, 1:] <= targets).sum(1)
    # Rounding may put a target at the very end, or a hair outside the block.
    first = (inside > 0).to(torch.uint8).argmax(1)
    columns = torch.minimum(torch.maximum(columns, first), _last_positive(inside))
    return (blocks[:, 0] * _BLOCK + columns).clamp_(0, vocab_size - 1)


def _last_positive(weights: Tensor) -> Tensor:
    """[R, n] -> [R]."""
    positive = (weights > 0).to(torch.uint8)
    return weights.shape[1] - 1 - positive.flip(1).argmax(1)

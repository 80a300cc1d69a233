"""Tokens that a device draws by itself, so that its next step can go on from them. Model thread.

The rule is the sampler's (:mod:`diptych.engine.sampling.sampler`) for rows that the host need not
see (:mod:`diptych.engine.scheduling.run_ahead`): greedy ones, and those that nothing filters. Where
numbers are added up in another order than the host's, a draw at the very boundary may differ.
Nothing here waits for the device.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor

from diptych.engine.sampling.sampler import mix
from diptych.engine.scheduling.run_ahead import GREEDY_BELOW
from diptych.engine.scheduling.step import SampledToken, SampleSpec
from diptych.errors import LogitsError

_BLOCK = 512  # ids per partial sum, as the sampler's


class DeviceDraws(NamedTuple):
    """One token for each of R rows."""

    token_ids: Tensor  # [R] int64, on the device; any id where logits are no numbers
    told: Tensor  # [R, 2] int64, on the host: the same, and whether logits are numbers

    @classmethod
    def of(cls, logits: Tensor, specs: Sequence[SampleSpec], positions: Sequence[int]) -> Self:
        """logits: [R, vocab_size] float32. positions: of the tokens to draw."""
        best = logits.amax(dim=1, keepdim=True)
        vocab_size = logits.shape[1]
        ids = torch.arange(vocab_size, device=logits.device)
        token_ids = ids.where(logits == best, vocab_size - 1).amin(dim=1)
        temperatures = np.array([spec.params.temperature for spec in specs])
        rows = np.flatnonzero(temperatures >= GREEDY_BELOW)
        if len(rows):
            uniforms = mix([spec.params.seed for spec in specs], positions)[rows]
            index = on_device(rows, logits.device)
            drawn = _draw(
                logits.index_select(0, index),
                best.index_select(0, index),
                on_device(temperatures[rows], logits.device),
                on_device(uniforms, logits.device),
            )
            token_ids.index_copy_(0, index, drawn)
        is_number = torch.isfinite(best[:, 0]).long()
        return cls(token_ids, _on_host(torch.stack((token_ids, is_number), dim=1)))

    def tell(self) -> list[SampledToken | LogitsError]:
        """Once the device has done all that it was asked for here."""
        return [
            SampledToken(token_id, float("nan"))
            if is_number
            else LogitsError("the model's logits for this sequence are not numbers")
            for token_id, is_number in self.told.tolist()
        ]


def on_device(values: NDArray[np.int64] | NDArray[np.float64], device: torch.device) -> Tensor:
    """A copy that nobody waits for: the driver has its own before this returns."""
    return torch.from_numpy(values).to(device, non_blocking=True)


def _on_host(x: Tensor) -> Tensor:
    """Filled when the device gets there."""
    if x.device.type == "cpu":
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


def _draw(logits: Tensor, best: Tensor, temperatures: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse CDF over the whole vocabulary, by partial sums of blocks of ids.

    logits: [R, vocab_size] float32; best: [R, 1]; temperatures, uniforms: [R] float64 -> [R].
    """
    vocab_size = logits.shape[1]
    weights = (logits - best).div_(temperatures.to(logits.dtype)[:, None]).exp_()
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

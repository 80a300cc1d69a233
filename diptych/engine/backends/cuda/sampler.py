"""The sampler on a device: what :mod:`diptych.engine.sampling.sampler` defines, in a few kernels.

One copy to the device says how each row is drawn, one copy back says what was drawn. The
largest logits, and so greedy tokens, are exactly the host's; the hash is the same bits, and
what is drawn by it the same token up to margins, as exponentials are rounded anew. Logits are
edited, and log probabilities found, by the code that every backend has.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from diptych.engine.backends.cuda.kernels import draws
from diptych.engine.device_copies import on_device
from diptych.engine.sampling.device_draws import DeviceDraws
from diptych.engine.sampling.logit_edits import Unseen, edit_logits
from diptych.engine.sampling.raw_logprobs import RawLogits
from diptych.engine.scheduling.run_ahead import GREEDY_BELOW
from diptych.engine.scheduling.step import SampledToken, SampleSpec
from diptych.errors import LogitsError

PART_SIZE = 2048  # tokens that a program looks at at a time


def sample(
    logits: Tensor,
    specs: Sequence[SampleSpec],
    positions: Sequence[int],
    part_size: int = PART_SIZE,
) -> list[SampledToken | LogitsError]:
    """As the host's. logits: [R, vocab_size] float32, contiguous; changed in place."""
    raw = RawLogits.of(logits, specs)
    edit_logits(logits, specs)
    token_ids, margins, largest = _told(logits, specs, positions, part_size).cpu().numpy().T
    margins = np.where([spec.params.return_margins for spec in specs], margins, np.nan)
    tokens = list(map(SampledToken, token_ids.astype(np.int64).tolist(), margins.tolist()))
    if raw is not None:
        raw.add_to(tokens)
    drawn: list[SampledToken | LogitsError] = list(tokens)
    for row in np.flatnonzero(~np.isfinite(largest)):
        drawn[row] = LogitsError("the model's logits for this sequence are not numbers")
    return drawn


def draw(
    logits: Tensor,
    specs: Sequence[SampleSpec],
    positions: Sequence[int],
    unseen: Unseen | None = None,
) -> DeviceDraws:
    """As ``DeviceDraws.of``. logits: [R, vocab_size] float32, contiguous; overwritten."""
    raw = RawLogits.of(logits, specs)
    edit_logits(logits, specs, unseen)
    told = _told(logits, specs, positions, PART_SIZE)
    return DeviceDraws.told_of(told[:, 0].long(), torch.isfinite(told[:, 2]), raw)


def _told(
    logits: Tensor, specs: Sequence[SampleSpec], positions: Sequence[int], part_size: int
) -> Tensor:
    """[R, 3] float64 on the device, not waited for: token id, margin, and the largest logit.

    A row whose largest logit is not finite has no token, whatever its id says.
    logits: [R, vocab_size] float32, contiguous; as they are after all edits. Overwritten.
    """
    num_rows, vocab_size = logits.shape
    num_parts = triton.cdiv(vocab_size, part_size)
    width = triton.next_power_of_2(num_parts)
    largest = logits.new_empty(num_rows, num_parts, 2)
    ids = logits.new_empty(num_rows, num_parts, dtype=torch.int32)
    told = logits.new_empty(num_rows, 3, dtype=torch.float64)
    rules = on_device(_rules(specs, positions, vocab_size), logits.device)
    sizes = {"part_size": part_size, "width": width, "greedy_below": GREEDY_BELOW}
    draws.find_largest[(num_rows, num_parts)](
        logits, largest, ids, vocab_size, part_size=part_size, num_warps=8
    )
    weights, sums = logits, told  # of nobody where all are greedy
    if any(spec.params.temperature >= GREEDY_BELOW for spec in specs):
        weights, levels = torch.empty_like(logits), logits.view(torch.int32)
        sums = told.new_empty(num_rows, num_parts)
        draws.weigh[(num_rows, num_parts)](
            logits, largest, rules, levels, weights, sums, vocab_size, num_warps=8, **sizes
        )
        for by_weight in _filters(specs, vocab_size):
            draws.cut[(num_rows,)](
                levels,
                largest,
                rules,
                weights,
                sums,
                vocab_size,
                num_parts,
                by_weight=by_weight,
                num_warps=16,
                **sizes,
            )
    draws.draw[(num_rows,)](
        largest, ids, rules, weights, sums, told, vocab_size, num_parts, num_warps=8, **sizes
    )
    return told


def _filters(specs: Sequence[SampleSpec], vocab_size: int) -> list[bool]:
    """Of top_k (False) and top_p (True) what any row asks for, in this order."""
    drawn = [spec.params for spec in specs if spec.params.temperature >= GREEDY_BELOW]
    asked = (any(0 < p.top_k < vocab_size for p in drawn), any(p.top_p < 1.0 for p in drawn))
    return [by_weight for by_weight in (False, True) if asked[by_weight]]


def _rules(
    specs: Sequence[SampleSpec], positions: Sequence[int], vocab_size: int
) -> NDArray[np.int64]:
    """[R, 6], as the kernels' fields are."""
    params = [spec.params for spec in specs]
    packed = np.empty((len(params), 6), np.int64)
    packed[:, 0] = [min(p.top_k or vocab_size, vocab_size) for p in params]
    packed[:, 1] = np.array([p.seed for p in params], np.uint64).view(np.int64)
    packed[:, 2] = positions
    packed[:, 3:].view(np.float64)[:] = [(p.temperature, p.top_p, p.min_p) for p in params]
    return packed

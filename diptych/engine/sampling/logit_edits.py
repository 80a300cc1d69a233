"""What is done to logits before a token is drawn from them, rows in place. On the model thread.

Rows do not influence each other, and a batch of which none asks for anything costs nothing.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from diptych.engine.scheduling.step import SampleSpec


def edit_logits(logits: Tensor, specs: Sequence[SampleSpec]) -> None:
    """Add each row's bias, then mask its stop tokens before ``min_tokens``.

    logits: [R, vocab_size] float32; changed in place.
    """
    _add_bias(logits, specs)
    _mask_stop_tokens(logits, specs)


def _add_bias(logits: Tensor, specs: Sequence[SampleSpec]) -> None:
    rows: list[int] = []
    columns: list[int] = []
    added: list[float] = []
    for row, spec in enumerate(specs):
        bias = spec.params.logit_bias
        if bias:
            rows += [row] * len(bias)
            columns += bias.keys()
            added += bias.values()
    if rows:
        index = torch.tensor([rows, columns], device=logits.device)
        logits[index[0], index[1]] += torch.tensor(added, dtype=logits.dtype, device=logits.device)


def _mask_stop_tokens(logits: Tensor, specs: Sequence[SampleSpec]) -> None:
    rows: list[int] = []
    columns: list[int] = []
    for row, spec in enumerate(specs):
        if spec.allow_stop or not spec.params.stop_token_ids:
            continue
        ids = [i for i in spec.params.stop_token_ids if 0 <= i < logits.shape[1]]
        if len(ids) < logits.shape[1]:  # with nothing else to draw, a stop token it is
            rows += [row] * len(ids)
            columns += ids
    if rows:
        index = torch.tensor([rows, columns], device=logits.device)
        logits[index[0], index[1]] = float("-inf")

"""What is done to logits before a token is drawn from them, rows in place. On the model thread.

Counts come from the tokens of a row's history, never from an earlier step. Rows do not
influence each other, and a batch of which none asks for anything costs nothing.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from diptych.engine.scheduling.step import History, SampleSpec
from diptych.sampling_params import SamplingParams


def edit_logits(logits: Tensor, specs: Sequence[SampleSpec]) -> None:
    """Add each row's bias, apply its penalties, mask its stop tokens before ``min_tokens``.

    The penalty of repetition comes before those of frequency and presence.
    logits: [R, vocab_size] float32; changed in place.
    """
    _add_bias(logits, specs)
    for row, spec in enumerate(specs):
        if spec.history is not None:
            _penalise(logits[row], spec.params, spec.history)
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


def _penalise(row: Tensor, params: SamplingParams, history: History) -> None:
    token_ids = np.frombuffer(history.token_ids, np.int64)
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(token_ids)).to(row.device)
        scores, penalty = row[seen], params.repetition_penalty
        row[seen] = torch.where(scores > 0, scores / penalty, scores * penalty)
    if params.frequency_penalty or params.presence_penalty:
        found, counts = np.unique(token_ids[history.num_prompt_tokens :], return_counts=True)
        taken = counts * params.frequency_penalty + params.presence_penalty
        row[torch.from_numpy(found).to(row.device)] -= torch.from_numpy(taken).to(row)


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

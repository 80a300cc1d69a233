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
    """Mask what completes a bad word, add the bias, apply penalties, mask early stop tokens.

    The penalty of repetition comes before those of frequency and presence.
    logits: [R, vocab_size] float32; changed in place.
    """
    for row, spec in enumerate(specs):
        if spec.params.bad_words:
            _mask_bad_words(logits[row], spec)
    _add_bias(logits, specs)
    for row, spec in enumerate(specs):
        if spec.history is not None:
            _penalise(logits[row], spec.params, spec.history)
    _mask_stop_tokens(logits, specs)


def _mask_bad_words(row: Tensor, spec: SampleSpec) -> None:
    last = [word[-1] for word in spec.params.bad_words if _is_begun(word, spec.history)]
    if last:
        row[torch.tensor(last, device=row.device)] = float("-inf")


def _is_begun(word: tuple[int, ...], history: History | None) -> bool:
    """Whether the output ends with all of the word's tokens but the last."""
    if len(word) == 1:
        return True
    assert history is not None, "longer words need what came before"
    start = len(history.token_ids) - len(word) + 1
    return start >= history.num_prompt_tokens and tuple(history.token_ids[start:]) == word[:-1]


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

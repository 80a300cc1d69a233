"""What is done to logits before a token is drawn from them, rows in place. On the model thread.

Counts come from the tokens of a row's history, never from an earlier step. Rows do not
influence each other, and a batch of which none asks for anything costs nothing.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from diptych.engine.scheduling.step import History, SampleSpec
from diptych.sampling_params import SamplingParams

# What to add to eight logits, for each byte of ``SampleSpec.allowed``: [256, 8] float32. Taken
# as pieces of 32 bytes, which is ten times as fast as to unpack the bits.
_OF_BYTE: Final = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf
).astype(np.float32)


def edit_logits(logits: Tensor, specs: Sequence[SampleSpec]) -> None:
    """Mask what does not fit, what completes a bad word, bias, penalise, mask early stop tokens.

    What does not fit a row's constraint stays out whatever else is asked for; of what fits,
    bad words and early stop tokens are left where there is nothing else.
    The penalty of repetition comes before those of frequency and presence.
    logits: [R, vocab_size] float32; changed in place.
    """
    _mask_unfit(logits, specs)
    for row, spec in enumerate(specs):
        if spec.params.bad_words:
            _mask_bad_words(logits[row], spec)
    _add_bias(logits, specs)
    for row, spec in enumerate(specs):
        if spec.history is not None:
            _penalise(logits[row], spec.params, spec.history)
    _mask_stop_tokens(logits, specs)


def _mask_unfit(logits: Tensor, specs: Sequence[SampleSpec]) -> None:
    for row, spec in enumerate(specs):
        if spec.allowed is None:
            continue
        packed = np.frombuffer(spec.allowed, np.uint8)
        if logits.device.type == "cpu":  # no threads: torch's would wait for each other longer
            values = logits[row].numpy()
            values += _OF_BYTE.view("V32")[:, 0].take(packed).view(np.float32)[: len(values)]
        else:
            index = torch.from_numpy(packed.astype(np.int32)).to(logits.device)
            added = torch.from_numpy(_OF_BYTE).to(logits.device).index_select(0, index)
            logits[row] += added.view(-1)[: logits.shape[1]]


def _mask(row: Tensor, token_ids: Sequence[int], spec: SampleSpec) -> None:
    """Where a constraint leaves nothing else, one of these it is."""
    index = torch.tensor(token_ids, device=row.device)
    before = row[index]
    row[index] = float("-inf")
    if spec.allowed is not None and row.amax() == float("-inf"):
        row[index] = before


def _mask_bad_words(row: Tensor, spec: SampleSpec) -> None:
    last = [word[-1] for word in spec.params.bad_words if _is_begun(word, spec.history)]
    if last:
        _mask(row, last, spec)


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
        if spec.allowed is not None:
            _mask(logits[row], ids, spec)
        elif len(ids) < logits.shape[1]:  # with nothing else to draw, a stop token it is
            rows += [row] * len(ids)
            columns += ids
    if rows:
        index = torch.tensor([rows, columns], device=logits.device)
        logits[index[0], index[1]] = float("-inf")

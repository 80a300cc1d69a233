"""What is done to logits before a token is drawn from them, rows in place. On the model thread.

Counts come from the tokens of a row's history, never from an earlier step; the last of them may be
one that the device alone has. Rows do not influence each other, and a batch of which none asks for
anything costs nothing. But for what a constraint does not allow, nothing waits for the device.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych.engine.device_copies import on_device
from diptych.engine.scheduling.step import History, SampleSpec
from diptych.sampling_params import SamplingParams

# What to add to eight logits, for each byte of ``SampleSpec.allowed``: [256, 8] float32. Taken
# as pieces of 32 bytes, which is ten times as fast as to unpack the bits.
_OF_BYTE: Final = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf
).astype(np.float32)
_NOBODY: Final = -1  # no token's id
_SPARSE: Final = (
    64  # fewer tokens than one in so many of the vocabulary are sorted sooner than marked
)

_Ints = NDArray[np.int64]


class Unseen(NamedTuple):
    """The tokens right behind some rows' histories, which the device has drawn."""

    rows: list[int]  # rising; of the batch
    token_ids: Tensor  # [len(rows)] int64, on the device

    def of_all(self, num_rows: int) -> Tensor:
        """Of each row of the batch; no token's id of the others: [num_rows]."""
        device = self.token_ids.device
        index = on_device(np.array(self.rows, np.int64), device)
        found = torch.full((num_rows,), _NOBODY, dtype=torch.int64, device=device)
        return found.index_copy_(0, index, self.token_ids)


def edit_logits(logits: Tensor, specs: Sequence[SampleSpec], unseen: Unseen | None = None) -> None:
    """Mask what does not fit, what completes a bad word, bias, penalise, mask early stop tokens.

    What does not fit a row's constraint stays out whatever else is asked for; of what fits,
    bad words and early stop tokens are left where there is nothing else.
    The penalty of repetition comes before those of frequency and presence.
    logits: [R, vocab_size] float32, contiguous; changed in place. unseen: of no row with a
    constraint.
    """
    _mask_unfit(logits, specs)
    _mask_bad_words(logits, specs, unseen)
    _add_bias(logits, specs)
    _penalise(logits, specs, unseen)
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


def _mask(row: Tensor, token_ids: Sequence[int]) -> None:
    """Of a row with a constraint: where that leaves nothing else, one of these it is."""
    index = torch.tensor(token_ids, device=row.device)
    before = row[index]
    row[index] = float("-inf")
    if row.amax() == float("-inf"):
        row[index] = before


def _mask_all(logits: Tensor, places: Sequence[tuple[int, int]]) -> None:
    """places: rows and token ids."""
    if places:
        index = on_device(np.array(places, np.int64).T, logits.device)
        logits[index[0], index[1]] = float("-inf")


def _mask_bad_words(logits: Tensor, specs: Sequence[SampleSpec], unseen: Unseen | None) -> None:
    masked: list[tuple[int, int]] = []
    maybe: list[tuple[int, int, int]] = []  # as the third is the row's unseen token or not
    unseen_rows = frozenset[int]() if unseen is None else frozenset(unseen.rows)
    for row, spec in enumerate(specs):
        words = spec.params.bad_words
        if not words:
            continue
        if row in unseen_rows:
            masked += [(row, word[0]) for word in words if len(word) == 1]
            longer = [word for word in words if len(word) > 1]
            maybe += [
                (row, word[-1], word[-2]) for word in longer if _ends_with(word[:-2], spec.history)
            ]
            continue
        lasts = [word[-1] for word in words if _ends_with(word[:-1], spec.history)]
        if lasts and spec.allowed is not None:
            _mask(logits[row], lasts)
        else:
            masked += [(row, last) for last in lasts]
    _mask_all(logits, masked)
    if maybe:
        assert unseen is not None, "rows of it"
        rows, columns, wanted = on_device(np.array(maybe, np.int64).T, logits.device)
        is_met = unseen.of_all(len(specs))[rows] == wanted
        most = torch.where(is_met, float("-inf"), float("inf")).to(logits.dtype)
        places = rows * logits.shape[1] + columns  # of which some may be the same
        logits.view(-1).scatter_reduce_(0, places, most, "amin")


def _ends_with(begin: tuple[int, ...], history: History | None) -> bool:
    """Whether the output ends with these tokens."""
    if not begin:
        return True
    assert history is not None, "longer words need what came before"
    start = len(history.token_ids) - len(begin)
    return start >= history.num_prompt_tokens and tuple(history.token_ids[start:]) == begin


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
        index = on_device(np.array([rows, columns], np.int64), logits.device)
        values = on_device(np.array(added, np.float64), logits.device)
        logits[index[0], index[1]] += values.to(logits.dtype)


class _Counts(NamedTuple):
    """Tokens that are penalised, and how often the output has each. All [num]."""

    rows: Tensor
    token_ids: Tensor
    counts: Tensor

    @classmethod
    def of(cls, parts: Sequence[tuple[int, _Ints, _Ints]], device: torch.device) -> "_Counts":
        """parts: a row, its tokens, and their counts."""
        rows = np.repeat([row for row, _, _ in parts], [len(ids) for _, ids, _ in parts])
        ids, counts = (np.concatenate([part[at] for part in parts]) for at in (1, 2))
        return cls(*on_device(np.stack((rows, ids, counts)).astype(np.int64), device))

    def with_one_more(self, token_ids: Tensor, rows: Tensor) -> "_Counts":
        """token_ids: of each row of the batch; counted of these rows."""
        is_it = self.token_ids == token_ids[self.rows]
        before = torch.zeros_like(token_ids)
        before.index_add_(0, self.rows, self.counts.where(is_it, 0))
        return _Counts(  # a token that was counted already is there twice, with the same count
            torch.cat((self.rows, rows)),
            torch.cat((self.token_ids, token_ids[rows])),
            torch.cat((self.counts + is_it, before[rows] + 1)),
        )


def _penalise(logits: Tensor, specs: Sequence[SampleSpec], unseen: Unseen | None) -> None:
    parts = [
        (row, *_counted(spec.params, spec.history, logits.shape[1]))
        for row, spec in enumerate(specs)
        if spec.history is not None and _is_penalised(spec.params)
    ]
    if not parts:
        return
    device = logits.device
    counted = _Counts.of(parts, device)
    if unseen is not None:
        penalised = {row for row, _, _ in parts}
        rows = np.array([row for row in unseen.rows if row in penalised], np.int64)
        counted = counted.with_one_more(unseen.of_all(len(specs)), on_device(rows, device))
    params = [spec.params for spec in specs]
    rules = np.array(
        [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params]
    )
    repetition, frequency, presence = on_device(rules, device)[counted.rows].T
    # Rounded once, and by the division that all devices have.
    repetition = repetition.to(logits.dtype)
    taken = counted.counts * frequency + presence.where(counted.counts > 0, 0.0)
    places = counted.rows * logits.shape[1] + counted.token_ids
    scores = logits.view(-1)[places]
    scores = torch.where(scores > 0, scores / repetition, scores * repetition)
    logits.view(-1)[places] = scores - taken.to(logits.dtype)


def _is_penalised(params: SamplingParams) -> bool:
    is_counted = params.frequency_penalty or params.presence_penalty
    return bool(is_counted) or params.repetition_penalty != 1.0


def _counted(params: SamplingParams, history: History, vocab_size: int) -> tuple[_Ints, _Ints]:
    """Tokens that are penalised, and how often the output has each."""
    token_ids = np.frombuffer(history.token_ids, np.int64)
    output = token_ids[history.num_prompt_tokens :]
    counted = output if params.repetition_penalty == 1.0 else token_ids
    if len(counted) * _SPARSE < vocab_size:
        found, places = np.unique(counted, return_inverse=True)
        return found, np.bincount(places[len(counted) - len(output) :], minlength=len(found))
    is_there = np.zeros(vocab_size, np.bool_)
    is_there[counted] = True
    found = np.flatnonzero(is_there)
    return found, np.bincount(output, minlength=vocab_size)[found]


def _mask_stop_tokens(logits: Tensor, specs: Sequence[SampleSpec]) -> None:
    masked: list[tuple[int, int]] = []
    for row, spec in enumerate(specs):
        if spec.allow_stop or not spec.params.stop_token_ids:
            continue
        ids = [i for i in spec.params.stop_token_ids if 0 <= i < logits.shape[1]]
        if spec.allowed is not None:
            _mask(logits[row], ids)
        elif len(ids) < logits.shape[1]:  # with nothing else to draw, a stop token it is
            masked += [(row, token_id) for token_id in ids]
    _mask_all(logits, masked)

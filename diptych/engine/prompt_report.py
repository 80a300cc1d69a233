"""What steps tell of the tokens that they compute. On the model thread."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from diptych.engine.model.decoder import Decoder
from diptych.engine.sampling.raw_logprobs import logprobs_of
from diptych.engine.scheduling.report import LogprobsPart, Part, SummedStates, Told
from diptych.engine.scheduling.step import Chunk
from diptych.errors import LogitsError
from diptych.token_logprobs import PromptLogprobs, TokenLogprobs

_MAX_LOGITS = 2**22  # at a time: a prompt's would be more than all else that a step needs


class ReportRows(NamedTuple):
    """The rows of a step's flat batch on which its chunks are to report."""

    parts: Mapping[int, Part]  # by the chunk's index
    rows: NDArray[np.int64]  # of all parts, one after the other

    @classmethod
    def of(cls, chunks: Sequence[Chunk], last_rows: NDArray[np.int64]) -> "ReportRows":
        """last_rows: [num_chunks], of each chunk's last token."""
        parts = {
            index: chunk.report for index, chunk in enumerate(chunks) if chunk.report is not None
        }
        rows = [np.empty(0, np.int64)]
        for index, part in parts.items():
            first = last_rows[index] + 1 - len(chunks[index].token_ids) + part.first_row
            rows.append(np.arange(first, first + part.num_rows))
        return cls(parts, np.concatenate(rows))

    def tell(self, hidden: Tensor, model: Decoder) -> dict[int, Told | LogitsError]:
        """Each chunk's report, or why there is none. hidden: [len(rows), hidden_size]."""
        told: dict[int, Told | LogitsError] = {}
        begin = 0
        for index, part in self.parts.items():
            mine = hidden[begin : begin + part.num_rows]
            begin += part.num_rows
            if isinstance(part, LogprobsPart):
                told[index] = _logprobs(part, mine, model)
            else:
                told[index] = _summed(mine, model)
        return told


def _logprobs(part: LogprobsPart, hidden: Tensor, model: Decoder) -> PromptLogprobs | LogitsError:
    """hidden: [num_rows, hidden_size]."""
    found: list[TokenLogprobs] = []
    num_rows = max(1, _MAX_LOGITS // model.config.vocab_size)
    for first in range(0, part.num_rows, num_rows):
        token_ids = part.token_ids[first : first + num_rows]
        logits = model.logits(hidden[first : first + num_rows])
        found += logprobs_of(logits, token_ids, [part.num_top] * len(token_ids))
    if any(math.isnan(each.logprob) for each in found):
        return LogitsError("the model's logits for this prompt are not numbers")
    return PromptLogprobs(part.position, tuple(found))


def _summed(hidden: Tensor, model: Decoder) -> SummedStates | LogitsError:
    """hidden: [num_rows, hidden_size]."""
    values = tuple(model.normed(hidden).double().sum(0).tolist())
    if not all(map(math.isfinite, values)):
        return LogitsError("the model's hidden states for this prompt are not numbers")
    return SummedStates(values)

"""What steps tell of the tokens that they compute. On the model thread."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from diptych.engine.sampling.raw_logprobs import logprobs_of
from diptych.engine.scheduling.report import LogprobsPart
from diptych.engine.scheduling.step import Chunk
from diptych.errors import LogitsError
from diptych.token_logprobs import PromptLogprobs, TokenLogprobs

_MAX_LOGITS = 2**22  # at a time: a prompt's would be more than all else that a step needs

Logits = Callable[[Tensor], Tensor]
"""Of hidden states; [R, hidden_size] -> [R, vocab_size] float32."""


class ReportRows(NamedTuple):
    """The rows of a step's flat batch on which its chunks are to report."""

    parts: Mapping[int, LogprobsPart]  # by the chunk's index
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
            rows.append(np.arange(first, first + len(part.token_ids)))
        return cls(parts, np.concatenate(rows))

    def tell(
        self, hidden: Tensor, logits: Logits, vocab_size: int
    ) -> dict[int, PromptLogprobs | LogitsError]:
        """Each chunk's report, or why there is none. hidden: [len(rows), hidden_size]."""
        told: dict[int, PromptLogprobs | LogitsError] = {}
        begin, num_rows = 0, max(1, _MAX_LOGITS // vocab_size)
        for index, part in self.parts.items():
            found: list[TokenLogprobs] = []
            for first in range(0, len(part.token_ids), num_rows):
                token_ids = part.token_ids[first : first + num_rows]
                at = begin + first
                scores = logits(hidden[at : at + len(token_ids)])
                found += logprobs_of(scores, token_ids, [part.num_top] * len(token_ids))
            begin += len(part.token_ids)
            if any(math.isnan(each.logprob) for each in found):
                told[index] = LogitsError("the model's logits for this prompt are not numbers")
            else:
                told[index] = PromptLogprobs(part.position, tuple(found))
        return told

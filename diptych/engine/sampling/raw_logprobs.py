"""Log probabilities by the model alone, for the rows that ask. On the model thread."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from diptych.engine.sampling.ranking import ranked
from diptych.engine.scheduling.step import SampledToken, SampleSpec
from diptych.token_logprobs import TokenLogprobs


class RawLogits(NamedTuple):
    """The logits of the rows that ask, as they were before anything changed them."""

    rows: list[int]  # which of the batch
    num_tops: list[int]  # of each of these, how many likeliest it asks for
    logits: Tensor  # [len(rows), vocab_size] float32, a copy

    @classmethod
    def of(cls, logits: Tensor, specs: Sequence[SampleSpec]) -> "RawLogits | None":
        """None where no row asks. logits: [R, vocab_size]."""
        asked = {
            row: spec.params.logprobs
            for row, spec in enumerate(specs)
            if spec.params.logprobs is not None
        }
        if not asked:
            return None
        index = torch.tensor(list(asked), device=logits.device)
        return cls(list(asked), list(asked.values()), logits.index_select(0, index))

    def add_to(self, drawn: list[SampledToken]) -> None:
        """Give each token whose row asks its log probabilities. drawn: one per row of the batch."""
        token_ids = [drawn[row].token_id for row in self.rows]
        found = logprobs_of(self.logits, token_ids, self.num_tops)
        for row, logprobs in zip(self.rows, found, strict=True):
            drawn[row] = drawn[row]._replace(logprobs=logprobs)


def logprobs_of(
    logits: Tensor, token_ids: Sequence[int], num_tops: Sequence[int]
) -> list[TokenLogprobs]:
    """Of each row: those of its token, and of so many likeliest ones. NaN where it has one.

    logits: [R, vocab_size] float32, unchanged.
    """
    index = torch.tensor(token_ids, device=logits.device)[:, None]
    sums = torch.logsumexp(logits.double(), 1, keepdim=True)
    own = (logits.gather(1, index).double() - sums)[:, 0].tolist()
    top = ranked(logits, min(max(num_tops), logits.shape[1]))
    values = (top.values - sums.cpu().numpy()).tolist()
    ids = top.ids.tolist()
    return [
        TokenLogprobs(own[row], tuple(ids[row][:count]), tuple(values[row][:count]))
        for row, count in enumerate(num_tops)
    ]

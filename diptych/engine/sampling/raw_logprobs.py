"""Log probabilities by the model alone, for the rows that ask. On the model thread."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from diptych.engine.device_copies import on_device, on_host
from diptych.engine.sampling.ranking import in_order, largest
from diptych.engine.scheduling.step import SampledToken, SampleSpec
from diptych.sampling_params import MAX_LOGPROBS
from diptych.token_logprobs import TokenLogprobs


class AskedLogprobs(NamedTuple):
    """Those of some rows' tokens and of the likeliest ones, on their way to the host."""

    num_tops: Sequence[int]
    own: Tensor  # [n] float64, of the rows' tokens
    sums: Tensor  # [n, 1] float64, what to take from logits
    values: Tensor  # [n, count] float64, the largest logits
    ids: Tensor  # [n, count] int64

    @classmethod
    def of(
        cls,
        logits: Tensor,
        token_ids: Tensor,
        num_tops: Sequence[int],
        to_host: Callable[[Tensor], Tensor] = on_host,
    ) -> "AskedLogprobs":
        """logits: [n, vocab_size] float32, unchanged; token_ids: [n] int64, in the same place."""
        sums = torch.logsumexp(logits.double(), 1, keepdim=True)
        own = (logits.gather(1, token_ids[:, None]).double() - sums)[:, 0]
        # As many whoever asks: which of equal ones are told goes by the row alone.
        count = max(MAX_LOGPROBS, *num_tops) if any(num_tops) else 0
        top = largest(logits, min(count, logits.shape[1]))
        return cls(num_tops, *map(to_host, (own, sums, *top)))

    def tell(self) -> list[TokenLogprobs]:
        """Once the device has done all that it was asked for here. NaN where a row has one."""
        top = in_order(self.values, self.ids)
        values, ids = (top.values - self.sums.numpy()).tolist(), top.ids.tolist()
        return [
            TokenLogprobs(own, tuple(ids[row][:count]), tuple(values[row][:count]))
            for row, (own, count) in enumerate(zip(self.own.tolist(), self.num_tops, strict=True))
        ]


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
        index = on_device(np.array(list(asked), np.int64), logits.device)
        return cls(list(asked), list(asked.values()), logits.index_select(0, index))

    def ask(self, token_ids: Tensor) -> AskedLogprobs:
        """token_ids: [R] int64, of the batch, where the logits are; nobody waits for them."""
        index = on_device(np.array(self.rows, np.int64), token_ids.device)
        return AskedLogprobs.of(self.logits, token_ids.index_select(0, index), self.num_tops)

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

    logits: [R, vocab_size] float32, unchanged; waits for them.
    """
    index = torch.tensor(token_ids, device=logits.device)
    return AskedLogprobs.of(logits, index, num_tops, Tensor.cpu).tell()

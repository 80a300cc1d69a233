"""Why workers were chosen: those that could have been, with what counted. For people who ask."""

import heapq
from collections.abc import Iterable
from typing import NamedTuple

_MAX_TOLD = 8  # of a pool


class ToldWorker(NamedTuple):
    """One worker that could have been chosen; the least ``work_tokens`` counts in its favour."""

    address: str
    is_chosen: bool
    # Prefill: tokens that wait there, and this prompt's that it lacks, more where it is slow.
    # Decode: its sequences and the prompts that it computes; what it lacks counts beside this.
    work_tokens: float
    num_missing_tokens: int  # of this prompt, that its prefix cache lacks as far as is known
    num_sequences: int | None  # on a decode worker
    # Until the prompt is computed there, or until what is missing is pulled; None: not known.
    predicted_s: float | None

    def text(self) -> str:
        """One line; the address is first."""
        parts = [self.address, "chosen"] if self.is_chosen else [self.address]
        parts += [
            f"work_tokens={self.work_tokens:.0f}",
            f"missing_tokens={self.num_missing_tokens}",
        ]
        if self.num_sequences is not None:
            parts.append(f"sequences={self.num_sequences}")
        if self.predicted_s is not None:
            parts.append(f"predicted_s={self.predicted_s:.4f}")
        return " ".join(parts)


class Explanation(NamedTuple):
    """Of each pool the best few, the chosen one first, and how many there were to choose from."""

    prefill: tuple[ToldWorker, ...]
    decode: tuple[ToldWorker, ...]
    num_prefill: int
    num_decode: int


def best_of(candidates: Iterable[ToldWorker]) -> tuple[ToldWorker, ...]:
    """Those that are told, the chosen one first."""
    return tuple(
        heapq.nsmallest(_MAX_TOLD, candidates, key=lambda c: (not c.is_chosen, c.work_tokens))
    )

"""Halves of pairs that are asked for only once the first one is granted. Pure.

Placement counts on them from the moment that the first one is asked for: else all who are placed
before it answers would find the other worker as idle as the first of them did.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import NamedTuple, TypeVar

from router.placement.placement import Paired
from router.placement.views import DecodeView, PrefillView, Snapshot, WorkerId

V = TypeVar("V", bound=PrefillView | DecodeView)


class _Half(NamedTuple):
    worker: WorkerId
    num_tokens: int | None  # of a prompt that it is to compute; None: it is to decode


class SecondHalves:
    """One router's. Each owner has at most one; who adds one asks for it or drops it."""

    def __init__(self, on_change: Callable[[], None], on_room: Callable[[], object]) -> None:
        """``on_change``: a snapshot would be another now; ``on_room``: it has more room."""
        self._on_change = on_change
        self._on_room = on_room
        self._halves: dict[Hashable, _Half] = {}

    def __contains__(self, owner: Hashable) -> bool:
        return owner in self._halves

    def add(self, owner: Hashable, pair: Paired, first: WorkerId, num_tokens: int) -> None:
        """``first`` is asked for its half; the prompt has so many tokens."""
        is_lease_first = first == pair.prefill
        half = _Half(pair.decode, None) if is_lease_first else _Half(pair.prefill, num_tokens)
        self._halves[owner] = half
        self._on_change()

    def asked(self, owner: Hashable) -> None:
        """It is asked for now, and counts by that. Idempotent."""
        if self._halves.pop(owner, None) is not None:
            self._on_change()

    def drop(self, owner: Hashable) -> None:
        """It will not be asked for. Idempotent."""
        if owner in self._halves:
            self.asked(owner)
            self._on_room()

    def over(self, snapshot: Snapshot) -> Snapshot:
        """The same workers as if all these halves had been asked for."""
        if not self._halves:
            return snapshot
        tokens: Counter[WorkerId] = Counter()
        sequences: Counter[WorkerId] = Counter()
        for worker, num_tokens in self._halves.values():
            if num_tokens is None:
                sequences[worker] += 1
            else:
                tokens[worker] += num_tokens
        computing = (_computing(view, tokens[view.worker]) for view in snapshot.decode)
        return replace(
            snapshot,
            prefill=tuple(_computing(view, tokens[view.worker]) for view in snapshot.prefill),
            decode=tuple(_decoding(view, sequences[view.worker]) for view in computing),
        )


def _computing(view: V, num_tokens: int) -> V:
    if not num_tokens:
        return view
    engine = view.engine
    if engine is not None:
        engine = replace(engine, num_departed_tokens=engine.num_departed_tokens + num_tokens)
    return replace(view, num_pending_tokens=view.num_pending_tokens + num_tokens, engine=engine)


def _decoding(view: DecodeView, num_sequences: int) -> DecodeView:
    if not num_sequences:
        return view
    return replace(view, num_sequences=view.num_sequences + num_sequences)

"""Which of the sequences that decode have their token with a step. Pure; one per step.

All do, but beside others those that give way have no more than they are allowed, whoever was passed
by for longest first. Who left its place for others, and has it again as nobody took it, is one of
them. What those leave that have no place again, or prompts that cannot use their turn, others have.
"""

from collections.abc import Iterable

from diptych.engine.scheduling.beside_others import Allowed
from diptych.engine.scheduling.prefill_shares import PrefillShares
from diptych.engine.scheduling.sequence import Sequence, SequenceState
from diptych.engine.scheduling.yielding import without_sitting_out


class Rows:
    """The single tokens of one step."""

    def __init__(
        self, decoding: list[Sequence], set_aside: Iterable[Sequence], allowed: Allowed | None
    ) -> None:
        """``decoding`` are in the batch, and ``set_aside`` were until this step."""
        self._all = decoding + [seq for seq in set_aside if seq.decodes_next]
        self._allowed = None if all(seq.gives_way for seq in decoding) else allowed
        going, num_going = self._all, 0
        if self._allowed is not None:
            going = without_sitting_out(self._all, self._allowed.max_rows)
            num_going = len(without_sitting_out(decoding, self._allowed.max_rows))
        self._sitting_out = frozenset(self._all).difference(going)
        self.ends = {
            seq: seq.num_planned_tokens for seq in decoding if seq not in self._sitting_out
        }
        self._num_kept = max(0, num_going - len(self.ends))

    @property
    def num_tokens(self) -> int:
        """That no prompt may have: some go where those that left their places stay without."""
        return len(self.ends) + self._num_kept

    @property
    def max_prompt_tokens(self) -> int | None:
        """That prompts which give way have beside these rows."""
        return None if self._allowed is None else self._allowed.max_prompt_tokens

    @property
    def num_sat_out(self) -> int:
        """Of those that have a place."""
        return sum(seq not in self.ends for seq in self._in_places())

    def sits_out(self, seq: Sequence) -> bool:
        """Whether one that has its place again has no token all the same."""
        return seq in self._sitting_out

    def fill_up(self, shares: PrefillShares) -> None:
        """All have their shares: take these along, and have more rows go for what was left."""
        self.ends |= shares.ends
        if self._allowed is None:
            return
        max_rows = self._allowed.max_rows
        if not shares.have_yielding:
            max_rows = max(max_rows, self._allowed.max_rows_else)
        going = without_sitting_out(self._in_places(), max_rows)
        more = [seq for seq in going if seq not in self.ends]
        num_left = self._num_kept + shares.num_left
        self.ends |= {seq: seq.num_planned_tokens for seq in more[:num_left]}

    def _in_places(self) -> list[Sequence]:
        return [seq for seq in self._all if seq.state is SequenceState.RUNNING]

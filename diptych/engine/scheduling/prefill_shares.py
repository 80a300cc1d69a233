"""How many tokens of a step each prompt gets. Pure; one per step, made by the scheduler.

Prompts come in the order of their arrival, and each gets what it needs as long as there
is any, but for five rules:

- A chunk that does not end its prompt ends with a block: readers are offered whole blocks.
- What would not fill a block begins no further prompt, unless it ends that one: a sliver
  costs attention over the whole past and offers readers nothing.
- A *long* prompt, which no step can complete, gets one half of the step at first, and at
  the end what the others left: it slows them down but does not stop them, nor they it.
- One that gives way gets nothing of a step that computes a part of one that does not, and of
  others what it may have. So the latter come first.
- Where nobody decodes, no further one is taken beside prompts that end with the step, if they had
  their tokens later by more, all together, than a step less saves all that wait. Where tokens cost
  much beside what a step costs whatever it has, one prompt is computed after the other; where they
  cost little, or many wait, steps are full. No step is cut short that does not take several times
  that constant.

Ideas: Sarathi's and vLLM's limits on long partial prefills; batches of least mean flow time.
"""

from diptych.engine.scheduling.sequence import Sequence
from diptych.step_model import ENOUGH_FIXED, StepCost


class PrefillShares:
    """Shares of ``num_tokens``, what a step has left for prompts."""

    def __init__(
        self,
        num_tokens: int,
        *,
        block_size: int,
        max_step_tokens: int,
        max_prompt_tokens: int | None = None,
        max_yielding_tokens: int | None = None,
        cost: StepCost | None = None,
        num_waiting: int = 0,
    ) -> None:
        """No step has more than ``max_step_tokens``: what makes a prompt a long one.

        ``max_prompt_tokens``: of these that prompts may have; single tokens are none.
        ``max_yielding_tokens``: of those, that prompts which give way may. ``cost`` is of a step
        with prompts and ``num_waiting`` how many there are; None: it does not matter.
        """
        num_for_prompts = _least(num_tokens, max_prompt_tokens)
        self.ends: dict[Sequence, int] = {}  # where the chunk of each sequence ends
        self._num_left = num_tokens
        self._num_left_for_prompts = num_for_prompts
        self._num_left_for_yielding = _least(num_for_prompts, max_yielding_tokens)
        self._num_left_for_long = num_for_prompts - num_for_prompts // 2
        self._block_size = block_size
        self._max_step_tokens = max_step_tokens
        self._cost = cost
        self._num_waiting = num_waiting
        self._num_ending = 0  # prompts, of those in the step
        self._num_taken = 0  # tokens of prompts
        self._unfinished: list[Sequence] = []  # long ones, by arrival

    @property
    def is_spent(self) -> bool:
        """Whether nobody can get anything any more."""
        return not self._num_left

    @property
    def num_left(self) -> int:
        """Tokens that nobody has."""
        return self._num_left

    @property
    def have_yielding(self) -> bool:
        """Whether the step computes a part of a prompt that gives way."""
        return any(seq.gives_way and not seq.decodes_next for seq in self.ends)

    def has_room_for(self, seq: Sequence) -> bool:
        """Whether ``take`` would give it a token now."""
        if self._had_better_wait(seq):
            return False
        return self._end(seq, self._allowed(seq)) > seq.num_planned_computed_tokens

    def take(self, seq: Sequence) -> None:
        """It is ``seq``'s turn."""
        if self._had_better_wait(seq):
            return
        is_long = self._is_long(seq)
        end = self._end(seq, self._allowed(seq))
        num_tokens = end - seq.num_planned_computed_tokens
        if is_long:
            self._unfinished.append(seq)
            self._num_left_for_long -= num_tokens
        if num_tokens:
            self._num_ending += end == seq.num_tokens and not seq.decodes_next
            self.ends[seq] = end
            self._spend(seq, num_tokens)

    def share_out_rest(self) -> None:
        """All had their turn: give the long ones what is left."""
        for seq in self._unfinished:
            before = self.ends.pop(seq, seq.num_planned_computed_tokens)
            end = self._end(seq, before - seq.num_planned_computed_tokens + self._left_for(seq))
            end = max(before, end)  # its turn may have given it a part of a block
            if end > seq.num_planned_computed_tokens:
                self.ends[seq] = end
                self._spend(seq, end - before)

    def _is_long(self, seq: Sequence) -> bool:
        num_left = seq.num_tokens - seq.num_planned_computed_tokens
        return num_left > self._max_step_tokens

    def _allowed(self, seq: Sequence) -> int:
        num_left = self._left_for(seq)
        return min(num_left, self._num_left_for_long) if self._is_long(seq) else num_left

    def _left_for(self, seq: Sequence) -> int:
        if seq.decodes_next:
            return self._num_left
        num_left = min(self._num_left, self._num_left_for_prompts)
        return min(num_left, self._num_left_for_yielding) if seq.gives_way else num_left

    def _spend(self, seq: Sequence, num_tokens: int) -> None:
        self._num_left -= num_tokens
        self._num_taken += num_tokens
        if seq.decodes_next:
            return
        self._num_left_for_prompts -= num_tokens
        if seq.gives_way:
            self._num_left_for_yielding -= num_tokens
        else:
            self._num_left_for_yielding = 0

    def _end(self, seq: Sequence, num_allowed: int) -> int:
        start = seq.num_planned_computed_tokens
        end = min(seq.num_tokens, start + num_allowed)
        if end == seq.num_tokens:
            return end
        aligned = end - end % self._block_size
        if aligned > start:
            return aligned
        return start if self.ends else end  # the first one must get on

    def _had_better_wait(self, seq: Sequence) -> bool:
        """Whether its part costs those that end with the step more than it saves who waits."""
        if self._cost is None or not self._num_ending:
            return False
        num_left = seq.num_tokens - seq.num_planned_computed_tokens
        num_tokens = min(num_left, self._left_for(seq))
        if self._num_taken * self._cost.prefill_token_s < ENOUGH_FIXED * self._cost.fixed_s:
            return False
        delayed_s = self._num_ending * num_tokens * self._cost.prefill_token_s
        return delayed_s > (self._num_waiting - len(self.ends)) * self._cost.fixed_s


def _least(num_tokens: int, at_most: int | None) -> int:
    return num_tokens if at_most is None else min(num_tokens, at_most)

"""What a placement costs everybody whom it concerns: objectives that are missed, seconds. Pure."""

from typing import NamedTuple

from router.placement.forecast import DecodeForecast, Span
from router.placement.types import Objectives


class Consequences(NamedTuple):
    """What would come of placing a request so, for it and for those where it decodes."""

    first_token: Span
    pace: DecodeForecast
    handoff_s: float = 0.0  # between its first token and its second, beside a step
    stalled_s: float = 0.0  # that each sequence there loses to the computing of its prompt

    def objectives_missed(self, objectives: Objectives, num_output_tokens: int) -> float:
        """How many are, by expectation, because of it: its own two, and those of each other."""
        missed = 0.0
        if objectives.ttft_s is not None:
            missed += self.first_token.miss_ratio(objectives.ttft_s)
        if objectives.tpot_s is not None:
            own = self.pace.after.later(self.handoff_s / num_output_tokens)
            theirs = self.pace.after.later(self.stalled_s / num_output_tokens)
            before = self.pace.before.miss_ratio(objectives.tpot_s)
            more = max(0.0, theirs.miss_ratio(objectives.tpot_s) - before)
            missed += own.miss_ratio(objectives.tpot_s) + self.pace.num_rows * more
        return missed

    def seconds(self, num_output_tokens: int) -> float:
        """Until its answer is whole, and by how much the others' answers come later."""
        slower_s = self.pace.after.expected_s - self.pace.before.expected_s
        each_s = self.stalled_s + num_output_tokens * slower_s
        own_s = self.first_token.expected_s + self.handoff_s
        own_s += num_output_tokens * self.pace.after.expected_s
        return own_s + self.pace.num_rows * each_s

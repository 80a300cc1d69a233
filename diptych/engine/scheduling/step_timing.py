"""How long steps take: what was measured, and what the next one should take. Pure."""

from collections.abc import Iterable

from diptych.step_model import MeasuredStep

_DECAY = 0.95  # weight of the past against one more step


class StepTiming:
    """Moving figures over completed steps; all 0 until known.

    The prediction is a line fitted to (tokens, seconds) with exponentially fading
    weights: a step costs something by itself, and something per token. Steps ``measured``
    before the first one predict that one: others are patient with it, too.
    """

    def __init__(self, measured: Iterable[MeasuredStep] = ()) -> None:
        # Faded sums of 1, x, y, x*x, x*y with x in tokens and y in seconds.
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._prefill_tokens = self._prefill_s = 0.0
        # Faded sums of 1, tokens and seconds of steps with parts of prompts.
        self._prompt_weight = self._prompt_x = self._prompt_y = 0.0
        self._decode_step_s = 0.0
        for work, duration_s in measured:
            self._fit(work.num_decode_rows + work.num_prefill_tokens, duration_s)
            if work.num_prefill_tokens:
                self._fit_prompt(work.num_decode_rows + work.num_prefill_tokens, duration_s)

    @property
    def prefill_tokens_per_s(self) -> float:
        return self._prefill_tokens / self._prefill_s if self._prefill_s else 0.0

    @property
    def decode_step_s(self) -> float:
        return self._decode_step_s

    def record(self, num_prefill_tokens: int, num_decode_tokens: int, duration_s: float) -> None:
        """Book a completed step."""
        num_tokens = num_prefill_tokens + num_decode_tokens
        self._fit(num_tokens, duration_s)
        if num_prefill_tokens:
            self._fit_prompt(num_tokens, duration_s)
        if num_prefill_tokens == 0:
            self._decode_step_s = fade(self._decode_step_s, duration_s)
        elif num_prefill_tokens > num_decode_tokens:
            self._prefill_tokens = self._prefill_tokens * _DECAY + num_prefill_tokens
            self._prefill_s = self._prefill_s * _DECAY + duration_s

    def predict_s(self, num_tokens: int) -> float:
        """Expected duration of a step of ``num_tokens``; never less than the line's start."""
        if not self._weight:
            return 0.0
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        if variance <= 1e-6 * mean_x * mean_x:  # one size only so far: by its rate, upwards
            return mean_y * max(1.0, num_tokens / mean_x)
        slope = max(0.0, (self._xy / self._weight - mean_x * mean_y) / variance)
        return max(0.0, mean_y - slope * mean_x) + slope * num_tokens

    def predict_prefill_s(self, num_tokens: int) -> float:
        """Of a step with parts of prompts, by the rate of such: single tokens say little of it."""
        if not self._prompt_weight:
            return self.predict_s(num_tokens)
        return self._prompt_y * max(1.0 / self._prompt_weight, num_tokens / self._prompt_x)

    def _fit(self, num_tokens: int, duration_s: float) -> None:
        x, y = float(num_tokens), duration_s
        self._weight = self._weight * _DECAY + 1.0
        self._x = self._x * _DECAY + x
        self._y = self._y * _DECAY + y
        self._xx = self._xx * _DECAY + x * x
        self._xy = self._xy * _DECAY + x * y

    def _fit_prompt(self, num_tokens: int, duration_s: float) -> None:
        self._prompt_weight = self._prompt_weight * _DECAY + 1.0
        self._prompt_x = self._prompt_x * _DECAY + num_tokens
        self._prompt_y = self._prompt_y * _DECAY + duration_s


def fade(average: float, value: float) -> float:
    """The moving average after one more value; 0 is "none yet"."""
    return value if average == 0.0 else average * _DECAY + value * (1 - _DECAY)

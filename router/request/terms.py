"""What a request asks for, is charged, and teaches when it has ended."""

import math
import time

from diptych.finish_reason import FinishReason
from router.generation.answer import Usage
from router.placement.answer_length import AnswerLength
from router.placement.engine_seconds import EngineRates
from router.placement.fair_queue import Turn
from router.placement.placement import Forecast
from router.placement.query import EndedRequest, Objectives
from router.request.resolved import ResolvedRequest
from router.request.services import Services


class Terms:
    """Of one request: its turn, its objectives, and its expected and real use of engines."""

    def __init__(self, request: ResolvedRequest, services: Services) -> None:
        self._request = request
        self._services = services
        self._num_resumed = len(request.emitted_token_ids)  # computed as if of its prompt
        self._came_s = time.monotonic()
        self._rates = EngineRates()  # as it will be charged
        self._charged: EngineRates | None = None  # as it was
        self._has_taught = False  # how long answers are
        self._was_whole = False  # its client had all of it before
        self._placed_by: Forecast | None = None
        self._num_emitted = 0  # when it was placed so

    def turn(self, num_cached: int = 0) -> Turn:
        """What the request waits by, and is charged when it is placed.

        ``num_cached`` tokens of its prompt are on some worker.
        """
        claim, shape = self._request.claim, self._request.shape
        self._rates = self._services.rates.of(self._services.cluster.snapshot())
        num_prompt = max(1, len(shape.prompt_ids) + self._num_resumed - num_cached)
        due_s = claim.first_token_due_s
        latest_start_s = None
        if due_s is not None and self._services.config.puts_hopeless_last:
            latest_start_s = due_s - self._rates.cost_s(num_prompt, 0)
        return Turn(
            claim.request_class,
            claim.tenant,
            self._rates.cost_s(num_prompt, self.num_expected(self._num_resumed)),
            due_s,
            latest_start_s,
            self._rates.cost_s(num_prompt, 0),
            math.inf if claim.tpot_s is None else claim.tpot_s,
        )

    def placed(self, forecast: Forecast | None, num_emitted: int) -> None:
        """It goes on where that says, with so many tokens; None: nothing was foretold."""
        self._placed_by, self._num_emitted = forecast, num_emitted

    def charged(self) -> None:
        """It is placed, and was charged for the turn that it had, if it had not been."""
        self._charged = self._charged or self._rates

    def used_s(self, usage: Usage) -> float:
        """What it took of the engines, by the tokens that it turned out to have."""
        rates = self._charged or self._rates
        return rates.cost_s(self._num_computed(usage), max(0, usage.num_new_tokens))

    def finished(self, usage: Usage, reason: FinishReason) -> None:
        """Its answer is whole: others' may be as long, unless it was so before it was asked for."""
        self._was_whole = 0 < usage.num_output_tokens == usage.num_resumed_tokens
        if self._was_whole:
            return
        self._teach(usage, is_cut=reason is FinishReason.LENGTH)
        if self._placed_by is not None:
            num_tokens = usage.num_output_tokens - self._num_emitted
            self._services.policy.answered(self._placed_by, num_tokens)

    def left(self, usage: Usage, *, was_taken: bool) -> float:
        """It ended; what it took of the engines, s: nothing where no worker that was to compute
        its prompt took it. An answer that is not whole would have been longer. Idempotent.
        """
        if usage.num_new_tokens > 0 and not self._has_taught:
            self._teach(usage, is_cut=True)
        return self.used_s(usage) if was_taken else 0.0

    def _teach(self, usage: Usage, *, is_cut: bool) -> None:
        claim, num_tokens = self._request.claim, usage.num_output_tokens
        if self._request.shape.max_tokens > 1:  # else its length was no choice of the model's
            self._services.lengths.learn(
                claim.request_class, claim.tenant, num_tokens, is_cut=is_cut
            )
        self._has_taught = True

    def ended(self, usage: Usage, first_s: float | None = None, last_s: float = 0.0) -> None:
        """Its answer is whole, with tokens at these moments; or, without any, it failed."""
        if self._was_whole:  # whatever workers do
            return
        num_gaps = usage.num_new_tokens - 1
        has_pace = first_s is not None and num_gaps > 0
        seen = EndedRequest(
            self._came_s,
            time.monotonic(),
            max(1, self._num_computed(usage)),
            self._objectives_then(),
            None if first_s is None else first_s - self._came_s,
            (last_s - first_s) / num_gaps if first_s is not None and has_pace else None,
        )
        self._services.policy.ended_as(seen)

    def num_expected(self, num_emitted: int = 0) -> int:
        """Tokens that are still to come."""
        return self.to_come(num_emitted).num_tokens

    def to_come(self, num_emitted: int) -> AnswerLength:
        """How long the rest of its answer may be."""
        claim, at_most = self._request.claim, self._request.shape.max_tokens
        return self._services.lengths.to_come(
            claim.request_class, claim.tenant, at_most, num_emitted
        )

    def objectives(self) -> Objectives:
        """What is left of what it wants, now that it has waited."""
        claim = self._request.claim
        due_s = claim.first_token_due_s
        if due_s is None:
            return Objectives(None, claim.tpot_s)
        whole_s = due_s - self._came_s if claim.ttft_s is None else claim.ttft_s
        left_s = due_s - time.monotonic()
        return Objectives(
            left_s, claim.tpot_s, whole_s, claim.has_deadline_first, claim.asks_first_too
        )

    def _num_computed(self, usage: Usage) -> int:
        """Tokens before its first new one that no cache had."""
        num_before = usage.num_prompt_tokens + self._num_resumed
        return max(0, num_before - usage.num_cached_tokens)

    def _objectives_then(self) -> Objectives:
        claim = self._request.claim
        due_s = claim.first_token_due_s
        ttft_s = None if due_s is None else due_s - self._came_s
        return Objectives(
            ttft_s,
            claim.tpot_s,
            has_deadline_first=claim.has_deadline_first,
            asks_first_too=claim.asks_first_too,
        )

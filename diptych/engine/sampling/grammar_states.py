"""Where each output stands in its grammar, and so which tokens may come next. Model thread.

A state is a cache of the output's tokens: it is made again from them wherever there is
none (a hand-off, another worker, one that was forgotten), and then moved by what is new.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import llguidance
import numpy as np

from diptych.constraint import OutputGrammar
from diptych.engine.scheduling.sequence import SequenceKey
from diptych.engine.scheduling.step import History, SampleSpec
from diptych.errors import DiptychError, InvalidRequestError, StepFailedError
from diptych.text.grammars import Compiled, Grammars

MAX_STATES: Final = 512  # more than a batch has; those of ended sequences go the first
# For the compiler, by all rows of a step together: others' grammars may stand before a row's own.
# Far less than the watch over the model thread allows; what the routers' check lets pass takes no
# more processor time.
MAX_WAIT_S: Final = 2.0
# Processor time that a sequence may take for its masks: so much per token, and so much at once.
# All rows of a step wait for it. Real schemas take 0.04 ms per token, the worst of them 0.2.
ALLOWANCE_S: Final = 0.001
MAX_SAVED_S: Final = 0.25
_FIELD: Final = "sampling.constraint"


class Constrained(NamedTuple):
    """What to draw from, and for which rows there is nothing to draw."""

    specs: list[SampleSpec]
    refused: dict[int, DiptychError]


@dataclass(slots=True)
class _State:
    matcher: llguidance.LLMatcher
    num_consumed: int = 0  # tokens of the output
    saved_s: float = MAX_SAVED_S  # it may take so much more than its allowance


class GrammarStates:
    """Owns the matchers. Invariant: a state is at a prefix of its sequence's output."""

    def __init__(
        self,
        grammars: Grammars | None,
        max_wait_s: float = MAX_WAIT_S,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """``grammars`` is None where the model has no tokenizer: no row may have a constraint.

        ``clock``: seconds that this thread has computed.
        """
        self._grammars = grammars
        self._clock = clock
        self._max_wait_s = max_wait_s
        self._states: OrderedDict[SequenceKey, _State] = OrderedDict()

    def constrain(self, specs: Sequence[SampleSpec]) -> Constrained:
        """Give each row with a constraint the tokens that it allows.

        Waits for those that are not compiled, within a bound: then the row alone is refused.
        """
        compiled_by_s = time.monotonic() + self._max_wait_s
        constrained = Constrained(list(specs), {})
        for row, spec in enumerate(specs):
            grammar = spec.params.constraint
            if grammar is None:
                continue
            assert spec.key is not None, "a constraint's row has its sequence's key"
            assert spec.history is not None, "a constraint needs what came before"
            try:
                allowed = self._allowed(spec.key, grammar, spec.history, compiled_by_s)
            except (InvalidRequestError, StepFailedError) as error:
                constrained.refused[row] = error
            else:
                constrained.specs[row] = replace(spec, allowed=allowed)
        return constrained

    def _allowed(
        self, key: SequenceKey, grammar: OutputGrammar, history: History, compiled_by_s: float
    ) -> bytes:
        grammars = self._grammars
        if grammars is None:
            raise InvalidRequestError("this worker's model has no tokenizer", field=_FIELD)
        began_s = self._clock()
        state = self._advanced(key, grammar, history, grammars, compiled_by_s)
        mask = np.frombuffer(state.matcher.compute_bitmask(), np.uint8).copy()
        if state.matcher.is_error():
            raise InvalidRequestError("is too complex to follow", field=_FIELD)
        state.saved_s = min(MAX_SAVED_S, state.saved_s + ALLOWANCE_S) - (self._clock() - began_s)
        if state.saved_s < 0:
            raise InvalidRequestError("takes too long to follow: it is ambiguous", field=_FIELD)
        for token_id in grammars.own_end_ids:
            mask[token_id >> 3] &= ~(1 << (token_id & 7)) & 0xFF
        if state.matcher.is_accepting():
            for token_id in grammar.end_token_ids:
                mask[token_id >> 3] |= 1 << (token_id & 7)
        if not mask.any():
            raise InvalidRequestError("leaves no token to go on with", field=_FIELD)
        return mask.tobytes()

    def _advanced(
        self,
        key: SequenceKey,
        grammar: OutputGrammar,
        history: History,
        grammars: Grammars,
        compiled_by_s: float,
    ) -> _State:
        """Raises InvalidRequestError, StepFailedError; the state is then forgotten."""
        begin = history.num_prompt_tokens
        num_output = len(history.token_ids) - begin
        state = self._states.pop(key, None)
        if state is None or state.num_consumed > num_output:
            compiled = _wait(grammars.compile(grammar.text), compiled_by_s)
            if compiled.matcher is None:
                raise InvalidRequestError(f"cannot be held to: {compiled.problem}", field=_FIELD)
            state = _State(compiled.begin())
        new = history.token_ids[begin + state.num_consumed :].tolist()
        if new and not state.matcher.consume_tokens(new):
            raise InvalidRequestError("does not fit the output so far", field=_FIELD)
        state.num_consumed = num_output
        self._states[key] = state
        if len(self._states) > MAX_STATES:
            self._states.popitem(last=False)
        return state


def _wait(compiling: Future[Compiled], until_s: float) -> Compiled:
    try:
        return compiling.result(max(0.0, until_s - time.monotonic()))
    except TimeoutError:
        raise StepFailedError("the constraint's grammar was not compiled in time") from None

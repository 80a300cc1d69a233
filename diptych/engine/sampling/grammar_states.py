"""Where each output stands in its grammar, and so which tokens may come next. Model thread.

A state is a cache of the output's tokens: it is made again from them wherever there is
none (a hand-off, another worker, one that was forgotten), and then moved by what is new.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import llguidance
import numpy as np
from numpy.typing import NDArray

from diptych.constraint import OutputGrammar
from diptych.engine.sampling.grammar_paces import (
    ALLOWANCE_PER_TOKEN_S,
    MIN_ALLOWANCE_S,
    GrammarPaces,
    Pace,
)
from diptych.engine.scheduling.sequence import SequenceKey
from diptych.engine.scheduling.step import History, SampleSpec
from diptych.errors import DiptychError, InvalidRequestError, StepFailedError
from diptych.text.grammars import (
    REPLAY_S,
    REPLAYED_AT_ONCE,
    Compiled,
    Grammars,
    NoGrammars,
    is_worn,
)

MAX_STATES: Final = 512  # or as many as a step has; those of ended sequences go the first
# For the compiler, by all rows of a step together: others' grammars may stand before a row's own.
# Far less than the watch over the model thread allows. No sequence has a step before its grammar
# is compiled, and keeps it: only where a lexer is worn does a step wait for another.
MAX_WAIT_S: Final = 2.0
# Of a row's lexer in one step: others may have worn the one that it finds; its own is the next.
_MAX_RENEWALS: Final = 2
_FIELD: Final = "sampling.constraint"


class Constrained(NamedTuple):
    """What to draw from, and for which rows there is nothing to draw."""

    specs: list[SampleSpec]
    refused: dict[int, DiptychError]


@dataclass(slots=True)
class _State:
    text: str
    compiled: Compiled
    matcher: llguidance.LLMatcher
    pace: Pace
    num_consumed: int = 0  # tokens of the output


class _Row(NamedTuple):
    """What one row needs to be masked."""

    key: SequenceKey
    grammar: OutputGrammar
    history: History
    pace: Pace
    compiled_by_s: float  # by time.monotonic


class GrammarStates:
    """Owns the matchers.

    Invariant: a state is at a prefix of its sequence's output. Once another begins, its grammar
    is remembered, or the step has a row of it.
    """

    def __init__(
        self,
        grammars: Grammars | NoGrammars,
        max_wait_s: float = MAX_WAIT_S,
        clock: Callable[[], float] = time.thread_time,
        wall_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without ``grammars`` no row may have a constraint.

        ``clock``: seconds that this thread has computed; ``wall_clock``: that have passed.
        """
        self._grammars = grammars
        self._clock = clock
        self._max_wait_s = max_wait_s
        self._states: OrderedDict[SequenceKey, _State] = OrderedDict()
        self._has_begun = False  # one of them, since those without a grammar were looked for
        vocab_size = 0 if isinstance(grammars, NoGrammars) else grammars.vocab_size
        self._allowance_s = max(MIN_ALLOWANCE_S, ALLOWANCE_PER_TOKEN_S * vocab_size)
        self._paces = GrammarPaces(wall_clock)

    def constrain(self, specs: Sequence[SampleSpec]) -> Constrained:
        """Give each row with a constraint the tokens that it allows.

        Waits for those that have to be compiled again, within a bound: then the row alone is
        refused.
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
        if self._has_begun:
            self._has_begun = False
            self._forget_idle({spec.key for spec in specs})
            self._forget_oldest(len(specs))
        return constrained

    def _allowed(
        self, key: SequenceKey, grammar: OutputGrammar, history: History, compiled_by_s: float
    ) -> bytes:
        grammars = self._grammars
        if isinstance(grammars, NoGrammars):
            raise InvalidRequestError(grammars.reason, field=_FIELD)
        known = self._states.get(key)
        if known is None:
            pace = self._paces.of(grammar.text)
            pace.check()
        else:
            pace = known.pace
        row = _Row(key, grammar, history, pace, compiled_by_s)
        state, mask = self._masked(row, grammars)
        # Where tokenizer.json does not call an end special, its name would fit as text.
        for token_id in grammars.own_end_ids | grammar.end_token_ids:
            mask[token_id >> 3] &= ~(1 << (token_id & 7)) & 0xFF
        if state.matcher.is_accepting():
            for token_id in grammar.end_token_ids:
                mask[token_id >> 3] |= 1 << (token_id & 7)
        whole_bytes, bits = divmod(grammars.vocab_size, 8)
        mask[whole_bytes : whole_bytes + 1] &= (1 << bits) - 1
        mask[whole_bytes + 1 :] = 0
        if not mask.any():
            raise InvalidRequestError("leaves no token to go on with", field=_FIELD)
        return mask.tobytes()

    def _masked(self, row: _Row, grammars: Grammars) -> tuple[_State, NDArray[np.uint8]]:
        """Where the output stands and its mask, by another lexer where one is worn.

        Raises InvalidRequestError, StepFailedError; the state is then forgotten.
        """
        for _ in range(1 + _MAX_RENEWALS):
            state = self._advanced(row, grammars)
            began_s = self._clock()
            mask = np.frombuffer(state.matcher.compute_bitmask(), np.uint8).copy()
            if not state.matcher.is_error():
                row.pace.spend(self._clock() - began_s, self._allowance_s)
                return state, mask
            self._states.pop(row.key, None)
            if not is_worn(state.matcher):
                break
            grammars.forget(state.text, state.compiled)
        raise InvalidRequestError("is too complex to follow", field=_FIELD)

    def _advanced(self, row: _Row, grammars: Grammars) -> _State:
        """The row's state, or one in error as its lexer is worn.

        Raises InvalidRequestError, StepFailedError; the state is then forgotten.
        """
        begin = row.history.num_prompt_tokens
        num_output = len(row.history.token_ids) - begin
        state = self._states.pop(row.key, None)
        if state is None or state.num_consumed > num_output:
            text = row.grammar.text
            compiled = _wait(grammars.compile(text), row.compiled_by_s)
            if compiled.matcher is None:
                raise InvalidRequestError(f"cannot be held to: {compiled.problem}", field=_FIELD)
            state = _State(text, compiled, compiled.begin(), row.pace)
            self._has_begun = True
        new = row.history.token_ids[begin + state.num_consumed :].tolist()
        for at in range(0, len(new), REPLAYED_AT_ONCE):
            began_s, some = self._clock(), new[at : at + REPLAYED_AT_ONCE]
            if not state.matcher.consume_tokens(some):
                if is_worn(state.matcher):
                    return state
                raise InvalidRequestError("does not fit the output so far", field=_FIELD)
            row.pace.spend(self._clock() - began_s, REPLAY_S * len(some))
        state.num_consumed = num_output
        self._states[row.key] = state
        return state

    def _forget_idle(self, stepped: Collection[SequenceKey | None]) -> None:
        """Those of other rows whose grammar is not remembered: they would keep its lexer."""
        for key, state in list(self._states.items()):
            if key not in stepped and not self._is_remembered(state):
                del self._states[key]

    def _forget_oldest(self, num_rows: int) -> None:
        """But none of this step's rows: each would be made again with every step."""
        while len(self._states) > max(MAX_STATES, num_rows):
            self._states.popitem(last=False)

    def _is_remembered(self, state: _State) -> bool:
        return not isinstance(self._grammars, NoGrammars) and self._grammars.is_remembered(
            state.text, state.compiled
        )


def _wait(compiling: Future[Compiled], until_s: float) -> Compiled:
    try:
        return compiling.result(max(0.0, until_s - time.monotonic()))
    except TimeoutError:
        raise StepFailedError("the constraint's grammar was not compiled in time") from None

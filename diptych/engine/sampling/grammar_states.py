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
from diptych.engine.scheduling.sequence import SequenceKey
from diptych.engine.scheduling.step import History, SampleSpec
from diptych.errors import DiptychError, InvalidRequestError, StepFailedError
from diptych.text.grammars import REPLAY_S, REPLAYED_AT_ONCE, Compiled, Grammars, is_worn

MAX_STATES: Final = 512  # more than a batch has; those of ended sequences go the first
# For the compiler, by all rows of a step together: others' grammars may stand before a row's own.
# Far less than the watch over the model thread allows; what the routers' check lets pass takes no
# more processor time.
MAX_WAIT_S: Final = 2.0
# Processor time that a grammar may take for its masks: so much for each, and so much at once.
# All rows of a step wait for it. Real schemas take 0.04 ms with 49,152 tokens, the worst of them
# 0.2; a mask that has to look at each token (of what a text may not have) takes 5 ns for each.
MIN_ALLOWANCE_S: Final = 0.001
ALLOWANCE_PER_TOKEN_S: Final = 40e-9  # of the vocabulary
MAX_SAVED_S: Final = 0.25
# Of a row's lexer in one step: others may have worn the one that it finds; its own is the next.
_MAX_RENEWALS: Final = 2
_MAX_PACES: Final = 1024  # grammars
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
    num_consumed: int = 0  # tokens of the output


class GrammarStates:
    """Owns the matchers.

    Invariant: a state is at a prefix of its sequence's output. Once another begins, its grammar
    is remembered, or the step has a row of it.
    """

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
        self._has_begun = False  # one of them, since those without a grammar were looked for
        vocab_size = 0 if grammars is None else grammars.vocab_size
        self._allowance_s = max(MIN_ALLOWANCE_S, ALLOWANCE_PER_TOKEN_S * vocab_size)
        self._saved_s: OrderedDict[str, float] = OrderedDict()  # of grammars; < 0: it is too slow

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
        if self._has_begun:
            self._has_begun = False
            self._forget_idle({spec.key for spec in specs})
        return constrained

    def _allowed(
        self, key: SequenceKey, grammar: OutputGrammar, history: History, compiled_by_s: float
    ) -> bytes:
        grammars = self._grammars
        if grammars is None:
            raise InvalidRequestError("this worker's model has no tokenizer", field=_FIELD)
        if self._saved_s.get(grammar.text, 0.0) < 0:
            raise _too_slow()
        state, mask = self._masked(key, grammar, history, grammars, compiled_by_s)
        for token_id in grammars.own_end_ids:
            mask[token_id >> 3] &= ~(1 << (token_id & 7)) & 0xFF
        if state.matcher.is_accepting():
            for token_id in grammar.end_token_ids:
                mask[token_id >> 3] |= 1 << (token_id & 7)
        if not mask.any():
            raise InvalidRequestError("leaves no token to go on with", field=_FIELD)
        return mask.tobytes()

    def _masked(
        self,
        key: SequenceKey,
        grammar: OutputGrammar,
        history: History,
        grammars: Grammars,
        compiled_by_s: float,
    ) -> tuple[_State, NDArray[np.uint8]]:
        """Where the output stands and its mask, by another lexer where one is worn.

        Raises InvalidRequestError, StepFailedError; the state is then forgotten.
        """
        for _ in range(1 + _MAX_RENEWALS):
            state = self._advanced(key, grammar, history, grammars, compiled_by_s)
            began_s = self._clock()
            mask = np.frombuffer(state.matcher.compute_bitmask(), np.uint8).copy()
            if not state.matcher.is_error():
                self._spend(grammar.text, self._clock() - began_s, self._allowance_s)
                return state, mask
            self._states.pop(key, None)
            if not is_worn(state.matcher):
                break
            grammars.forget(grammar.text, state.compiled)
        raise InvalidRequestError("is too complex to follow", field=_FIELD)

    def _advanced(
        self,
        key: SequenceKey,
        grammar: OutputGrammar,
        history: History,
        grammars: Grammars,
        compiled_by_s: float,
    ) -> _State:
        """The row's state, or one in error as its lexer is worn.

        Raises InvalidRequestError, StepFailedError; the state is then forgotten.
        """
        begin = history.num_prompt_tokens
        num_output = len(history.token_ids) - begin
        state = self._states.pop(key, None)
        if state is None or state.num_consumed > num_output:
            compiled = _wait(grammars.compile(grammar.text), compiled_by_s)
            if compiled.matcher is None:
                raise InvalidRequestError(f"cannot be held to: {compiled.problem}", field=_FIELD)
            state = _State(grammar.text, compiled, compiled.begin())
            self._has_begun = True
        new = history.token_ids[begin + state.num_consumed :].tolist()
        for at in range(0, len(new), REPLAYED_AT_ONCE):
            began_s, some = self._clock(), new[at : at + REPLAYED_AT_ONCE]
            if not state.matcher.consume_tokens(some):
                if is_worn(state.matcher):
                    return state
                raise InvalidRequestError("does not fit the output so far", field=_FIELD)
            self._spend(grammar.text, self._clock() - began_s, REPLAY_S * len(some))
        state.num_consumed = num_output
        self._states[key] = state
        if len(self._states) > MAX_STATES:
            self._states.popitem(last=False)
        return state

    def _forget_idle(self, stepped: Collection[SequenceKey | None]) -> None:
        """Those of other rows whose grammar is not remembered: they would keep its lexer."""
        for key, state in list(self._states.items()):
            if key not in stepped and not self._is_remembered(state):
                del self._states[key]

    def _is_remembered(self, state: _State) -> bool:
        return self._grammars is not None and self._grammars.is_remembered(
            state.text, state.compiled
        )

    def _spend(self, text: str, spent_s: float, allowed_s: float) -> None:
        """Of what a grammar may take. Raises InvalidRequestError: it is too slow, for good."""
        saved_s = min(MAX_SAVED_S, self._saved_s.get(text, MAX_SAVED_S) + allowed_s) - spent_s
        self._saved_s[text] = saved_s
        self._saved_s.move_to_end(text)
        if len(self._saved_s) > _MAX_PACES:
            self._saved_s.popitem(last=False)
        if saved_s < 0:
            raise _too_slow()


def _too_slow() -> InvalidRequestError:
    return InvalidRequestError("takes too long to follow: it is ambiguous", field=_FIELD)


def _wait(compiling: Future[Compiled], until_s: float) -> Compiled:
    try:
        return compiling.result(max(0.0, until_s - time.monotonic()))
    except TimeoutError:
        raise StepFailedError("the constraint's grammar was not compiled in time") from None

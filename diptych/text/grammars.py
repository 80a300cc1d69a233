"""Grammars over a tokenizer's tokens, by llguidance: what may come next in an output. Any thread.

Compiling takes milliseconds, of some grammars seconds, and lets other threads run meanwhile.
Reading the tokenizer does not, which is why it is read at start. A matcher is a cache of the
tokens that it has consumed: 1 us each brings one to where another was.
"""

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple
from weakref import WeakValueDictionary, ref

import llguidance

from diptych.errors import ConfigurationError

MAX_REMEMBERED: Final = 32  # grammars, beside those that are kept
# Of a grammar's lexer, which all its matchers share and which never forgets one; 0.35 kB each.
# Text of a bounded length takes 16 for each token, and real schemas some thousand.
MAX_LEXER_STATES: Final = 65_536
# Ten times what real schemas need for a mask. What is more ambiguous costs tens of milliseconds.
MAX_ITEMS_PER_STEP: Final = 10_000
REPLAYED_AT_ONCE: Final = 16  # tokens of an output, when a state is made again from them
REPLAY_S: Final = 20e-6  # that one of them may take; nearly all take 1 us
LIMITS: Final = llguidance.LLParserLimits(
    verbose_errors=False,  # they quote the text
    step_max_items=MAX_ITEMS_PER_STEP,
    max_lexer_states=MAX_LEXER_STATES,
)


class Compiled(NamedTuple):
    """A grammar with this tokenizer, or why there is none."""

    matcher: llguidance.LLMatcher | None  # at its begin; copied, never moved
    problem: str

    def begin(self) -> llguidance.LLMatcher:
        """A matcher of one's own, at the grammar's begin. Copies share what they learn."""
        assert self.matcher is not None, "there is none"
        return self.matcher.deep_copy()


def is_worn(matcher: llguidance.LLMatcher) -> bool:
    """Whether it failed as its lexer has no room left: one that is compiled anew may go on."""
    return "too many states" in matcher.get_error()


class NoGrammars(NamedTuple):
    """In the place of grammars: no output can be held to a constraint."""

    reason: str


NO_TOKENIZER: Final = NoGrammars("this worker's model has no tokenizer")


class Grammars:
    """Compiles for one tokenizer, and remembers what was asked for last and what is kept.

    Invariant: a grammar is compiled once as long as it is remembered, however many ask. So its
    lexer holds what all its outputs needed, and is dropped with it, or when it is worn.
    """

    def __init__(self, tokenizer: llguidance.LLTokenizer, vocab_size: int | None = None) -> None:
        """``vocab_size`` is that of the model's output; None: it has all the tokenizer's tokens."""
        self.num_compiled = 0
        self.vocab_size: int = tokenizer.vocab_size if vocab_size is None else vocab_size
        """Of the model's output. Masks have bits for the tokenizer's further tokens."""
        self.own_end_ids = frozenset(tokenizer.eos_tokens)
        """What the library takes for an output's end, whatever the model's makers say."""
        self._tokenizer = tokenizer
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._known: WeakValueDictionary[str, Future[Compiled]] = WeakValueDictionary()
        self._last: OrderedDict[str, Future[Compiled]] = OrderedDict()  # of these

    @classmethod
    def from_folder(cls, folder: Path, vocab_size: int) -> "Grammars":
        """Of a model's tokenizer. Blocking, and holds up all other threads, up to seconds.

        Raises:
            ConfigurationError: there is no tokenizer, it is of a kind that is not known, or a
                file beside it is wrong.
        """
        from diptych.text.tokenizer import whole_tokenizer  # which the check's process is without

        text = whole_tokenizer(folder).to_str()
        try:
            return cls(_read_tokenizer(text, vocab_size), vocab_size)
        except ValueError as error:
            raise ConfigurationError(f"{folder / 'tokenizer.json'}: {error}") from None

    def compile(self, text: str) -> "Future[Compiled]":
        """Begin to compile a grammar, unless that was done. The result never raises.

        It is remembered as long as anybody keeps what is returned, and the last ones are anyhow.
        What nobody keeps any more when its turn comes is not compiled.
        """
        with self._lock:
            known = self._known.get(text)
            if known is None:
                known = self._known[text] = Future()
                self._compiler.submit(self._finish, text, ref(known))
            elif known.done():
                self._remember(text, known)
            return known

    def is_remembered(self, text: str, compiled: Compiled) -> bool:
        """Whether ``compile`` has this one for the text, rather than none or another."""
        with self._lock:
            return self._has(text, compiled)

    def forget(self, text: str, worn: Compiled) -> None:
        """Compile the grammar anew when it is asked for next, unless that was done."""
        with self._lock:
            if self._has(text, worn):
                self._known.pop(text, None)
                self._last.pop(text, None)

    def _remember(self, text: str, known: Future[Compiled]) -> None:
        self._last[text] = known
        self._last.move_to_end(text)
        if len(self._last) > MAX_REMEMBERED:
            self._last.popitem(last=False)

    def _finish(self, text: str, wanted: "ref[Future[Compiled]]") -> None:
        future = wanted()
        if future is None:
            return
        try:
            compiled = self._compile(text)
        except Exception as error:  # noqa: BLE001 - whoever waits for it is told
            future.set_exception(error)
            return
        with self._lock:
            self._remember(text, future)
        future.set_result(compiled)

    def _has(self, text: str, compiled: Compiled) -> bool:
        known = self._known.get(text)
        return known is not None and known.done() and known.result() is compiled

    def _compile(self, text: str) -> Compiled:
        self.num_compiled += 1
        matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # what has no first token shows only here
        if matcher.is_error():
            return Compiled(None, matcher.get_error().partition("\n")[0])
        return Compiled(matcher, "")


def _read_tokenizer(text: str, vocab_size: int) -> llguidance.LLTokenizer:
    """With room for the model's output, and for tokens beyond it. Raises ValueError."""
    try:
        return llguidance.LLTokenizer(text, n_vocab=vocab_size)
    except ValueError:
        tokenizer = llguidance.LLTokenizer(text)
        if tokenizer.vocab_size <= vocab_size:  # they were not the reason
            raise
        return tokenizer

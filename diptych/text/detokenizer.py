"""Output tokens to text, as they come, and where a stop string ends it. Pure.

Invariant: without stop strings, the deltas of all pushes and the flush joined
are what the tokenizer decodes for all output tokens at once (special tokens
left out), with one exception: where decoding drops the space that SentencePiece
puts before a text, it stays, because an output continues its prompt.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from diptych.text.stop_strings import StopMatcher
from diptych.text.tokenizer import Tokenizer

BULK_TOKENS = 64  # in one push: from here on a search as a whole is cheaper


class TextDelta(NamedTuple):
    """What a push made certain.

    ``text``: whole characters, nothing that may still begin a stop string.
    ``stop_match``: the stop string that ended the output; the text excludes it.
    ``num_tokens_used``: how many of the pushed tokens belong to the output, up
    to and including the one that completed the stop string.
    """

    text: str
    stop_match: str | None
    num_tokens_used: int


class Detokenizer:
    """The text of one output. One owner, on the event loop.

    A stop string counts only if the token that completes it is the
    ``min_tokens``-th or a later one. Cost per token: its own characters.
    """

    __slots__ = (
        "_assembler",
        "_has_stop",
        "_held",
        "_is_finished",
        "_matcher",
        "_min_tokens",
        "_num_tokens",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        """``shown_ids`` are special tokens whose text counts, too.

        Raises ValueError if a stop string is empty.
        """
        self._assembler = tokenizer.text.assembler(shown_ids)
        self._matcher = StopMatcher(stop)
        self._has_stop = bool(stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""  # not yet emitted: the last ``num_held`` characters
        self._is_finished = False

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Add output tokens, in order. Not after a stop match or a flush.

        A token that ends the output (end of sequence, a stop token) is pushed
        or not as its text is wanted or not; special tokens have none.
        """
        assert not self._is_finished
        if not self._has_stop:  # nothing is ever held back
            push = self._assembler.push
            return TextDelta(
                "".join([push(token_id) for token_id in token_ids]), None, len(token_ids)
            )
        if len(token_ids) >= BULK_TOKENS:
            return self._push_many(token_ids)
        parts: list[str] = []
        for index, token_id in enumerate(token_ids):
            self._num_tokens += 1
            text, stop_match = self._match(self._assembler.push(token_id))
            parts.append(text)
            if stop_match is not None:
                self._is_finished = True
                return TextDelta("".join(parts), stop_match, index + 1)
        return TextDelta("".join(parts), None, len(token_ids))

    def flush(self) -> TextDelta:
        """The rest, when the output ended: held text, and broken characters as U+FFFD."""
        assert not self._is_finished
        self._is_finished = True
        text, stop_match = self._match(self._assembler.flush())
        if stop_match is None:
            text += self._held
        return TextDelta(text, stop_match, 0)

    def _push_many(self, token_ids: Sequence[int]) -> TextDelta:
        """The same for many tokens at once, such as those of an output that is resumed."""
        pieces = [self._assembler.push(token_id) for token_id in token_ids]
        text, num_before = "".join(pieces), self._num_tokens
        self._num_tokens += len(pieces)
        num_disabled = max(0, self._min_tokens - num_before - 1)
        first_enabled = sum(map(len, pieces[:num_disabled]))
        pending, num_held = self._held + text, len(self._held)
        match = self._matcher.push_text(self._held, text, first_enabled)
        if match is None:
            emitted = len(pending) - self._matcher.num_held
            self._held = pending[emitted:]
            return TextDelta(pending[:emitted], None, len(pieces))
        end, stop = match
        self._is_finished = True
        self._held = ""
        num_used = bisect_left(list(accumulate(map(len, pieces))), end) + 1
        return TextDelta(pending[: num_held + end - len(stop)], stop, num_used)

    def _match(self, text: str) -> tuple[str, str | None]:
        """Add ``text``; returns what can be emitted, and the stop string if one matched."""
        pending = self._held + text
        enabled = self._num_tokens >= self._min_tokens
        for index, character in enumerate(text):
            stop_match = self._matcher.push(character, enabled=enabled)
            if stop_match is not None:
                end = len(self._held) + index + 1
                self._held = ""
                return pending[: end - len(stop_match)], stop_match
        emitted = len(pending) - self._matcher.num_held
        self._held = pending[emitted:]
        return pending[:emitted], None

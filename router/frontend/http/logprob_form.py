"""Log probabilities as OpenAI's two APIs write them. Pure.

Chats have one object for each token, completions four lists side by side. Both name a
token by its text, which is not always whole characters (U+FFFD stands in then); a special
token by its name. A chat tells its bytes too.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from diptych.text.token_text import TokenText
from diptych.token_logprobs import TokenLogprobs
from router.frontend.http.json_parts import SmallItems

_LEAST: Final = -9999.0  # JSON has no infinity; other servers say this too


def finite(logprob: float) -> float:
    """As JSON can say it."""
    return max(logprob, _LEAST)


def by_token_id(
    text: TokenText, token_id: int, found: TokenLogprobs, num_top: int
) -> Mapping[str, object]:
    """As vLLM writes those of a place: by token id; a token's rank where it is told."""
    top = list(zip(found.top_token_ids, found.top_logprobs, strict=True))[:num_top]
    named = {
        str(each): _described(text, each, logprob, rank)
        for rank, (each, logprob) in enumerate(top, 1)
    }
    return {str(token_id): _described(text, token_id, found.logprob, None), **named}


def _described(
    text: TokenText, token_id: int, logprob: float, rank: int | None
) -> Mapping[str, object]:
    spelt = text.spelling(token_id).decode(errors="replace")
    return {"logprob": finite(logprob), "rank": rank, "decoded_token": spelt}


class LogprobWriter(Protocol):
    """Those of one choice, in order; what was taken is told."""

    def add(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """The next tokens, and as many log probabilities."""
        ...

    def take(self) -> Mapping[str, object] | None:
        """The member ``logprobs`` for all tokens since it was last taken; None without any."""
        ...


class ChatLogprobs:
    """Implements ``LogprobWriter`` for chats."""

    def __init__(self, text: TokenText) -> None:
        self._text = text
        self._entries = SmallItems[Mapping[str, object]]()

    def add(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        for token_id, found in zip(token_ids, logprobs, strict=True):
            top = zip(found.top_token_ids, found.top_logprobs, strict=True)
            likeliest = [self._entry(*each) for each in top]
            self._entries.append(
                {**self._entry(token_id, found.logprob), "top_logprobs": likeliest}
            )

    def take(self) -> Mapping[str, object] | None:
        taken = self.take_entries()
        return {"content": taken, "refusal": None} if taken else None

    def take_entries(self) -> Sequence[Mapping[str, object]]:
        """One for each token since they were last taken."""
        taken, self._entries = self._entries, SmallItems()
        return taken

    def _entry(self, token_id: int, logprob: float) -> Mapping[str, object]:
        spelt = self._text.spelling(token_id)
        return {
            "token": spelt.decode(errors="replace"),
            "logprob": finite(logprob),
            "bytes": list(spelt),
        }


class CompletionLogprobs:
    """Implements ``LogprobWriter`` for completions.

    ``text_offset`` is where in the answer's text a token's own begins; the drawn token is
    among its ``top_logprobs`` whether or not it is one of the likeliest.
    """

    def __init__(self, text: TokenText) -> None:
        self._text = text
        self._assembler = text.assembler()
        self._echoed = ""
        self._offset = 0
        self._clear()

    def begin_with(self, echoed: str) -> None:
        """The answer's text begins with the prompt as its client wrote it.

        Special tokens may be spelt in it, and it lacks the space that a tokenizer puts before it.
        """
        self._echoed = echoed

    def add(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        for token_id, found in zip(token_ids, logprobs, strict=True):
            named: dict[str, float] = {}
            top = zip(found.top_token_ids, found.top_logprobs, strict=True)
            for each, logprob in ((token_id, found.logprob), *top):
                name = self._name(each)
                named[name] = max(logprob, named.get(name, _LEAST))  # two may read alike
            self._append(token_id, finite(found.logprob), named)

    def add_first(self, token_id: int) -> None:
        """The first token of a prompt: nothing comes before it, so that it has none."""
        self._append(token_id, None, None)

    def take(self) -> Mapping[str, object] | None:
        taken = {
            "text_offset": self._offsets,
            "token_logprobs": self._logprobs,
            "tokens": self._tokens,
            "top_logprobs": self._tops,
        }
        self._clear()
        return taken if taken["tokens"] else None

    def _append(
        self, token_id: int, logprob: float | None, named: Mapping[str, float] | None
    ) -> None:
        self._tokens.append(self._name(token_id))
        self._logprobs.append(logprob)
        self._tops.append(named)
        self._offset += len(self._assembler.end_before(token_id))
        self._offsets.append(self._offset)
        self._offset += self._length(token_id)

    def _length(self, token_id: int) -> int:
        """How many characters of the text are the token's."""
        length = len(self._assembler.push(token_id))
        if self._offset < len(self._echoed):
            name = self._name(token_id)
            for spelt in (name, name.removeprefix(" ")):
                if spelt and self._echoed.startswith(spelt, self._offset):
                    return len(spelt)
        return length

    def _clear(self) -> None:
        self._offsets: list[int] = []
        self._logprobs: list[float | None] = []
        self._tokens: list[str] = []
        self._tops = SmallItems[Mapping[str, float] | None]()

    def _name(self, token_id: int) -> str:
        return self._text.spelling(token_id).decode(errors="replace")

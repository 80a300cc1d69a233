"""Contents of chats in which control tokens are plain text: only the template structures a prompt.

What a client wrote is marked before the template sees it and found again in what the template
made of it. A tokenizer without control tokens then reads what stands between those of the
template's own. Marked are the signs that such tokens are written with (``<``, ``|``), wherever
they stand, so that neither what a template puts around a client's words nor what it takes out of
them completes a token; and a word that makes one in brackets, where it is all that a string
says. Not covered: a template that makes a token's name of a part of a client's string, or of
several, and writes it in brackets of its own; a token of one letter that the vocabulary has too.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from tokenizers import AddedToken
from tokenizers import Tokenizer as HFTokenizer

from diptych.errors import InvalidRequestError

# Signs of Linear A, in an order that no inscription has: printable, so that nobody escapes them.
_BEGIN: Final = "\U00010600\U00010601\U00010600"
_END: Final = "\U00010601\U00010600\U00010601"
_BEFORE: Final = "\U00010602\U00010600\U00010602"
_OURS: Final = re.compile(f"{_BEGIN}|{_END}|{_BEFORE}")
_HIDDEN: Final = re.compile(f"{_BEGIN}([0-9]{{1,9}}){_END}")
_ESCAPED: Final = re.compile(r"\\ud801\\ude0[01]", re.IGNORECASE)
_FIELD: Final = "chat.messages"
# That templates themselves know, and write control tokens with.
_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


class Span(NamedTuple):
    """A part of a text."""

    begin: int
    end: int


class MarkedText(NamedTuple):
    """A prompt, and what of it is plain text whatever it looks like: in order, apart."""

    text: str
    inert: tuple[Span, ...] = ()

    @property
    def own_end(self) -> str | None:
        """What stands behind all that is inert; None: nothing is."""
        return self.text[self.inert[-1].end :] if self.inert else None


class HiddenTexts:
    """What was hidden in one chat. One owner."""

    def __init__(self, control: "ControlTokens") -> None:
        self._control = control
        self._numbers: dict[str, int] = {}  # of few texts, however often they stand somewhere

    def hide(self, value: Any, *, is_role: bool = False) -> Any:
        """The same value with all in its strings hidden that could be of a control token.

        So is a string's end that could become one together with what follows. A role that
        every template knows stays as it is: there are some that write a control token with it.
        Takes time linear in the strings' length. Raises InvalidRequestError.
        """
        try:
            return value if is_role and value in _ROLES else self._hide(value, is_role=is_role)
        except RecursionError:
            raise InvalidRequestError("have values nested too deeply", field=_FIELD) from None

    def restore(self, rendered: str) -> MarkedText:
        """What the template made of it. Raises InvalidRequestError: it took them apart."""
        if not self._numbers:
            return MarkedText(rendered)
        texts = list(self._numbers)
        parts: list[str] = []
        spans: list[Span] = []
        length = at = 0
        for found in _HIDDEN.finditer(rendered):
            number = int(found[1])
            if number >= len(texts):
                break  # no mark of ours: refused below
            between, hidden = rendered[at : found.start()], texts[number]
            at = found.end()
            length += len(between)
            spans.append(Span(length, length + len(hidden)))
            length += len(hidden)
            parts += [between, hidden]
        text = "".join([*parts, rendered[at:]])
        if _OURS.search(text) or _ESCAPED.search(text):
            raise InvalidRequestError(
                "have signs of control tokens in their text, which this model's chat template "
                "takes apart",
                field=_FIELD,
            )
        return MarkedText(text, tuple(spans))

    def _hide(self, value: Any, *, is_role: bool = False) -> Any:
        if isinstance(value, str):
            return self._hide_in(value, is_role=is_role)
        if isinstance(value, Mapping):
            return {self._hide(name): self._hide(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [self._hide(each) for each in value]
        return value

    def _hide_in(self, text: str, *, is_role: bool) -> str:
        if found := _OURS.search(text):
            raise InvalidRequestError(f"have {found[0]!r}, which is reserved", field=_FIELD)
        word = text.strip()
        if self._control.is_name(word, is_part=is_role):
            before, behind = text.split(word, 1)
            return f"{before}{self._hidden(word)}{behind}"
        text, end = self._control.without_end(text)
        hidden = self._control.to_hide.sub(lambda found: self._hidden(found[0]), text)
        if not end:
            return hidden
        words = end.rstrip()
        return f"{hidden}{self._hidden(words)}{end[len(words) :]}"

    def _hidden(self, text: str) -> str:
        return f"{_BEGIN}{self._numbers.setdefault(text, len(self._numbers))}{_END}"


class ControlTokens:
    """Those of one model: what is special, and what its own chat template writes besides.

    Immutable; any thread.
    """

    def __init__(self, tokenizer: HFTokenizer, chat_template: str) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self._tokens = {
            token.content: (id_, token)
            for id_, token in added.items()
            if token.special or _is_mark_in(token.content, chat_template)
        }
        self.pattern = _pattern_of(self._tokens)
        """Finds them as tokenizers do."""
        signs = frozenset(sign for text in self._tokens for sign in text if _is_sign(sign))
        self.to_hide = _to_hide(self._tokens, signs)
        """Finds what of a client's text no template may make a part of one."""
        self._begins = frozenset(
            text[:n]
            for text in self._tokens
            for n in range(1, len(text))
            if signs.isdisjoint(text[:n])
        )
        self._names = frozenset(
            name.casefold() for text in self._tokens for name in _names_of(text, signs)
        )
        self._all_casefolded = "\n".join(self._tokens).casefold()
        self._most = max(map(len, self._tokens), default=0)
        self._ids = frozenset(id_ for id_, _ in self._tokens.values())
        others = [token for token in added.values() if token.content not in self._tokens]
        self._plain = _without(tokenizer, others)
        self._other_ids = {
            self._plain.token_to_id(token.content): id_
            for id_, token in added.items()
            if token.content not in self._tokens
        }

    def is_name(self, word: str, *, is_part: bool) -> bool:
        """Whether in brackets it is one of them, in any case; or some part of one."""
        if not word or len(word) > self._most:
            return False
        folded = word.casefold()
        return folded in self._names or (is_part and folded in self._all_casefolded)

    def without_end(self, text: str) -> tuple[str, str]:
        """A text, and its end apart if that is one of theirs begun; white space may follow."""
        length = len(text.rstrip())
        for at in range(max(0, length - self._most), length):
            if text[at:length] in self._begins and not self._overlaps(text, at, length):
                return text[:at], text[at:]
        return text, ""

    def encode(self, marked: MarkedText) -> list[int]:
        """The tokens of a prompt, without any that models want around it."""
        text = marked.text
        token_ids: list[int] = []
        at = 0
        before: AddedToken | None = None
        for begin, end in _between(marked):
            for found in self.pattern.finditer(text, begin, end):
                id_, token = self._tokens[found[0]]
                token_ids += self._encode_plainly(text[at : found.start()], before, token)
                token_ids.append(id_)
                at, before = found.end(), token
        return token_ids + self._encode_plainly(text[at:], before, None)

    def _encode_plainly(
        self, text: str, before: AddedToken | None, behind: AddedToken | None
    ) -> list[int]:
        """What stands between two control tokens; None: where all begins, and where it ends."""
        if before is not None and before.rstrip:
            text = text.lstrip()
        if behind is not None and behind.lstrip:
            text = text.rstrip()
        token_ids = self._ids_of(text, is_first=before is None)
        if self._ids.isdisjoint(token_ids):
            return token_ids
        return [id_ for each in token_ids for id_ in self._spelled(each)]

    def _ids_of(self, text: str, *, is_first: bool) -> list[int]:
        """Behind another token some tokenizers read a text's begin otherwise."""
        if not text:
            return []
        before = "" if is_first else _BEFORE
        # Without the GIL, as Tokenizer.encode.
        (made,) = self._plain.encode_batch_fast([f"{before}{text}"], add_special_tokens=False)
        token_ids = made.ids[0 if is_first else 1 :]
        return [self._other_ids.get(each, each) for each in token_ids]

    def _spelled(self, token_id: int) -> list[int]:
        """Letter by letter if it is one of them, which the vocabulary itself has, too."""
        if token_id not in self._ids:
            return [token_id]
        model = self._plain.model
        return [
            each.id for letter in model.id_to_token(token_id) for each in model.tokenize(letter)
        ]

    def _overlaps(self, text: str, begin: int, end: int) -> bool:
        """Whether a whole one ends within."""
        return any(
            found.end() > begin
            for found in self.pattern.finditer(text, max(0, begin - self._most), end)
        )


def _is_mark_in(text: str, chat_template: str) -> bool:
    """Not white space or a word, which the template writes for itself."""
    return text in chat_template and not text.isspace() and not text.isalnum()


def _is_sign(letter: str) -> bool:
    """What tokens are set off with, but not what would have to be escaped in JSON, and no slash,
    by which templates know what users switch (``/no_think``)."""
    is_plain = letter == "_" or letter == "/" or letter.isalnum() or letter.isspace()
    return not is_plain and json.dumps(letter, ensure_ascii=False) == f'"{letter}"'


def _to_hide(texts: Iterable[str], signs: frozenset[str]) -> re.Pattern[str]:
    """Whole tokens, as far as JSON says them as they are, and each sign: those of the marks too."""
    whole = [text for text in texts if json.dumps(text, ensure_ascii=False) == f'"{text}"']
    bare = [text for text in texts if signs.isdisjoint(text)]
    each = "".join(map(re.escape, sorted(signs | set(_BEGIN + _END + _BEFORE))))
    return re.compile(f"{_pattern_of([*whole, *bare]).pattern}|[{each}]+")


def _names_of(text: str, signs: frozenset[str]) -> Iterator[str]:
    """What is left of it without some of the signs and slashes around its words."""
    words = [at for at, letter in enumerate(text) if letter == "_" or letter.isalnum()]
    if not words:
        return
    for begin in range(words[0] + 1):
        for end in range(words[-1] + 1, len(text) + 1):
            if signs.isdisjoint(text[begin:end]):
                yield text[begin:end]


def _without(tokenizer: HFTokenizer, others: list[AddedToken]) -> HFTokenizer:
    """The same tokenizer, of added tokens only with ``others`` and one to stand before a text."""
    plain = HFTokenizer(tokenizer.model)
    if tokenizer.normalizer is not None:
        plain.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        plain.pre_tokenizer = tokenizer.pre_tokenizer
    plain.add_tokens([*others, AddedToken(_BEFORE, normalized=False)])
    return plain


def _between(marked: MarkedText) -> Iterator[Span]:
    """What is not inert, in order."""
    begin = 0
    for span in marked.inert:
        yield Span(begin, span.begin)
        begin = span.end
    yield Span(begin, len(marked.text))


def _pattern_of(texts: Iterable[str]) -> re.Pattern[str]:
    """The longest of them wherever one is. What many begin with is looked at once."""
    tree: _Tree = {}
    for text in texts:
        node = tree
        for letter in text:
            node = node.setdefault(letter, {})
        node[""] = {}
    return re.compile(_written(tree) if tree else "(?!)")


_Tree = dict[str, "_Tree"]


def _written(tree: _Tree) -> str:
    branches = [f"{re.escape(letter)}{_written(node)}" for letter, node in tree.items() if letter]
    if len(branches) == 1 and "" not in tree:
        return branches[0]
    return f"(?:{'|'.join(branches)}){'?' if '' in tree else ''}" if branches else ""

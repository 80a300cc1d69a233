"""What each token contributes to a text, by the tokenizer's own decoder.

Decoding a whole output again for every token would cost its square. The two
decoders in use work token by token: *byte-level* tokens are bytes of UTF-8;
*SentencePiece* tokens are text, or single bytes that only make characters
together with their neighbours. An assembler carries what is not yet whole.
"""

import codecs
import json
import re
from contextlib import suppress
from typing import Any, Protocol

from tokenizers import Tokenizer as HFTokenizer

from diptych.errors import ConfigurationError

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TextAssembler(Protocol):
    """Joins one output's tokens to text; state of one sequence."""

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; whole characters."""

    def end_before(self, token_id: int) -> str:
        """The text of those before that becomes certain as this one comes next; then push it."""

    def flush(self) -> str:
        """The rest, when no more tokens come; broken characters as U+FFFD."""


class TokenText:
    """The pieces of a vocabulary; shared by all sequences of one event loop.

    Special tokens and ids outside of the vocabulary have no text.

    Raises:
        ConfigurationError: the tokenizer's decoder is of another kind.
    """

    def __init__(self, tokenizer: HFTokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self._pieces: dict[int, str | bytes] = {}
        self._whole: dict[int, str | None] = {}
        steps = _decoder_steps(tokenizer)
        kinds = [step["type"] for step in steps]
        self.is_byte_level = kinds == ["ByteLevel"]
        if self.is_byte_level:
            return
        self._has_byte_tokens = "ByteFallback" in kinds
        self._replacements: list[tuple[str, str]] = []
        for step in steps:
            if step["type"] == "Replace" and "String" in step["pattern"]:
                self._replacements.append((step["pattern"]["String"], step["content"]))
            elif step["type"] == "Metaspace":
                self._replacements.append((step["replacement"], " "))
            elif step["type"] not in ("ByteFallback", "Fuse", "Strip"):
                raise ConfigurationError(
                    f"tokenizer.json: decoder {step['type']!r} is not supported"
                )

    def assembler(self, shown_ids: frozenset[int] = frozenset()) -> TextAssembler:
        """A new assembler, for one output; ``shown_ids`` are special tokens that have a text."""
        if self.is_byte_level:
            return _ByteLevelAssembler(self, shown_ids)
        return _PieceAssembler(self, shown_ids)

    def piece(self, token_id: int) -> str | bytes:
        """The token's text, or its bytes where they need not be whole characters."""
        piece = self._pieces.get(token_id)
        if piece is None:
            token = self._tokenizer.id_to_token(token_id)
            if token is None:  # not kept: there are more such ids than memory
                return ""
            piece = self._pieces[token_id] = self._make_piece(token_id, token)
        return piece

    def whole(self, token_id: int) -> str | None:
        """The token's text where that is whole characters, whatever came before it."""
        try:
            return self._whole[token_id]
        except KeyError:
            piece = self.piece(token_id)
            whole: str | None = None
            with suppress(UnicodeDecodeError):
                whole = piece if isinstance(piece, str) else piece.decode()
            if token_id in self._pieces:
                self._whole[token_id] = whole
            return whole

    def spelling(self, token_id: int) -> bytes:
        """The token's bytes; a special one's are those of its name, where it has no text."""
        piece = self.piece(token_id)
        if not piece:
            piece = self._tokenizer.id_to_token(token_id) or ""
        return piece.encode() if isinstance(piece, str) else piece

    def _make_piece(self, token_id: int, token: str) -> str | bytes:
        if token_id in self._special_ids:
            return ""
        if self.is_byte_level:
            try:
                return bytes(_BYTE_OF_CHARACTER[character] for character in token)
            except KeyError:  # an added token, which is plain text
                return token.encode()
        for old, new in self._replacements:
            token = token.replace(old, new)
        match = _BYTE_TOKEN.fullmatch(token) if self._has_byte_tokens else None
        return token if match is None else bytes.fromhex(match[1])


class _ByteLevelAssembler:
    __slots__ = (
        "_decoder",
        "_is_within",
        "_pieces",
        "_shown_ids",
    )

    def __init__(self, pieces: TokenText, shown_ids: frozenset[int]) -> None:
        self._pieces = pieces
        self._shown_ids = shown_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_within = False  # a character

    def push(self, token_id: int) -> str:
        is_shown = token_id in self._shown_ids
        if not self._is_within and not is_shown:  # as nearly always
            whole = self._pieces.whole(token_id)
            if whole is not None:
                return whole
        piece = self._piece(token_id)
        text = self._decoder.decode(piece) if isinstance(piece, bytes) else ""
        self._is_within = bool(self._decoder.getstate()[0])
        return text

    def end_before(self, token_id: int) -> str:
        piece = self._piece(token_id)
        if not self._is_within or not isinstance(piece, bytes):
            return ""
        try:
            codecs.utf_8_decode(self._decoder.getstate()[0] + piece[:1])
        except UnicodeDecodeError:  # it begins anew, and the character stays broken
            self._is_within = False
            return self.flush()
        return ""

    def _piece(self, token_id: int) -> str | bytes:
        if token_id in self._shown_ids:
            return self._pieces.spelling(token_id)
        return self._pieces.piece(token_id)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _PieceAssembler:
    """A run of byte tokens is text only as a whole, so it waits for its end."""

    def __init__(self, pieces: TokenText, shown_ids: frozenset[int]) -> None:
        self._pieces = pieces
        self._shown_ids = shown_ids
        self._run = bytearray()

    def push(self, token_id: int) -> str:
        piece = self._piece(token_id)
        if isinstance(piece, bytes):
            self._run += piece
            return ""
        return self.flush() + piece if piece else ""

    def end_before(self, token_id: int) -> str:
        piece = self._piece(token_id)
        return self.flush() if piece and isinstance(piece, str) else ""

    def _piece(self, token_id: int) -> str | bytes:
        if token_id in self._shown_ids:
            return self._pieces.spelling(token_id).decode()
        return self._pieces.piece(token_id)

    def flush(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:  # the library's rule: then none of it is text
            return _REPLACEMENT * len(run)


def _decoder_steps(tokenizer: HFTokenizer) -> list[Any]:
    """The decoder's JSON, as the list of its steps."""
    if tokenizer.decoder is None:
        raise ConfigurationError("tokenizer.json: it has no decoder")
    decoder = json.loads(tokenizer.decoder.__getstate__())
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _byte_of_character() -> dict[str, int]:
    """Byte-level vocabularies write each byte as one printable character.

    Printable Latin-1 stands for itself, the other bytes follow from U+0100 on
    (Radford et al., Language Models are Unsupervised Multitask Learners).
    """
    itself = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in itself]
    table = {chr(byte): byte for byte in itself}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()

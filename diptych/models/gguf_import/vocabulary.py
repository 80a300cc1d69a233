"""The vocabulary of a GGUF file: token texts, scores and kinds."""

import enum
from collections.abc import Sequence
from typing import NamedTuple

from diptych.errors import ConfigurationError
from diptych.models.gguf_import.gguf_file import GGUFFile


class TokenKind(enum.IntEnum):
    """ggml's numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Vocabulary(NamedTuple):
    """Index is the token id in all three."""

    tokens: Sequence[str]
    scores: Sequence[float]  # empty for byte-level BPE
    kinds: Sequence[TokenKind]

    def ids(self) -> dict[str, int]:
        """Id by text; raises ConfigurationError if a text occurs twice."""
        result = {token: index for index, token in enumerate(self.tokens)}
        if len(result) != len(self.tokens):
            raise ConfigurationError("the vocabulary has a token twice")
        return result

    def of_kind(self, *kinds: TokenKind) -> list[str]:
        """Texts of these kinds, by id."""
        pairs = zip(self.tokens, self.kinds, strict=True)
        return [token for token, kind in pairs if kind in kinds]


def read_vocabulary(file: GGUFFile) -> Vocabulary:
    """Read it; raises ConfigurationError if parts are missing or disagree in length."""
    tokens = file.strings("tokenizer.ggml.tokens")
    kinds = [TokenKind.NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in file.metadata:
        numbers = file.numbers("tokenizer.ggml.token_type")
        try:
            kinds = [TokenKind(int(number)) for number in numbers]
        except ValueError as error:
            raise ConfigurationError(f"{file.path}: token type: {error}") from None
    scores: list[float] = []
    if "tokenizer.ggml.scores" in file.metadata:
        scores = file.numbers("tokenizer.ggml.scores")
    if len(kinds) != len(tokens) or len(scores) not in (0, len(tokens)):
        raise ConfigurationError(f"{file.path}: tokens, scores and types differ in number")
    return Vocabulary(tokens, scores, kinds)


def token_id(file: GGUFFile, role: str, default: int | None = None) -> int:
    """The token of this role; raises ConfigurationError if none, or one that does not exist."""
    key = f"tokenizer.ggml.{role}_token_id"
    found, num_tokens = file.integer(key, default), len(file.strings("tokenizer.ggml.tokens"))
    if not 0 <= found < num_tokens:
        raise ConfigurationError(
            f"{file.path}: metadata {key!r} is {found}, which is none of the {num_tokens} tokens"
        )
    return found

"""Tokens that stand beside tokenizer.json, in tokenizer_config.json or added_tokens.json."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from diptych.errors import ConfigurationError
from diptych.json_file import read_object

_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")
_LISTS = ("additional_special_tokens", "extra_special_tokens")  # of transformers 4 and 5


def add_stated_tokens(
    tokenizer: Tokenizer, folder: Path, settings: Mapping[str, Any], roles: Collection[str]
) -> None:
    """Add those that tokenizer.json lacks; special is what either file calls so.

    ``settings`` are of tokenizer_config.json, ``roles`` the tokens that it gives one. As in
    transformers, added_tokens.json counts where the settings list no tokens.

    Raises:
        ConfigurationError: one cannot have the id that is stated.
    """
    path = folder / "tokenizer_config.json"
    listed = settings.get("added_tokens_decoder")
    if listed is None:
        path = folder / "added_tokens.json"
        listed = _by_id(path, roles) if path.is_file() else {}
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    for token_id, text, entry in sorted(_entries(path, listed), key=lambda each: each[0]):
        own = known.get(text)
        if own is None:
            flags = {name: bool(entry[name]) for name in _FLAGS if entry.get(name) is not None}
            tokenizer.add_tokens([AddedToken(text, **flags)])
            found = tokenizer.token_to_id(text)
            if found != token_id:
                raise ConfigurationError(
                    f"{path}: {text!r} is token {token_id}, which tokenizer.json does "
                    f"not have and would have as {found}"
                )
        elif entry.get("special") and not own.special:
            own.special = True
            tokenizer.add_special_tokens([own])


def add_named_tokens(
    tokenizer: Tokenizer, settings: Mapping[str, Any], bounds: Collection[str]
) -> None:
    """Pieces of the vocabulary that the settings list as special are tokens, as in transformers.

    So are ``bounds``, which begin or end a text. Not what pads one, which may be any word.
    """
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    lists = (settings.get(name) for name in _LISTS)
    named = [text for each in lists if isinstance(each, list) for text in each]
    for text in (*bounds, *named):
        is_piece = isinstance(text, str) and tokenizer.token_to_id(text) is not None
        if is_piece and text not in added:
            tokenizer.add_special_tokens([AddedToken(text, normalized=False)])


def _entries(path: Path, listed: Any) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    """Id, content and what else is said of each; one without a text is none."""
    try:
        for token_id, entry in (listed or {}).items():
            text = entry["content"]
            if text:
                yield int(token_id), str(text), entry
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        raise ConfigurationError(f"{path}: its added tokens must have ids and contents") from None


def _by_id(path: Path, roles: Collection[str]) -> dict[int, dict[str, object]]:
    """added_tokens.json, which has ids by content, as tokenizer_config.json has tokens."""
    try:
        return {
            token_id: {"content": text, "special": text in roles, "normalized": text not in roles}
            for text, token_id in read_object(path).items()
        }
    except TypeError as error:
        raise ConfigurationError(f"{path}: {error}") from None

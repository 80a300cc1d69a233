"""Text to token ids and back, and what a model folder says about its tokens.

Everything is read from the folder's tokenizer.json, tokenizer_config.json, added_tokens.json,
config.json and generation_config.json. Needs neither torch nor transformers.
"""

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HFTokenizer

from diptych.errors import ConfigurationError, InvalidRequestError
from diptych.json_file import read_object
from diptych.text.added_tokens import add_named_tokens, add_stated_tokens
from diptych.text.chat_template import SPECIAL_TOKEN_ROLES, ChatTemplate, Message, Tool
from diptych.text.context_length import context_length
from diptych.text.identity import text_digest
from diptych.text.inert import ControlTokens, HiddenTexts, MarkedText
from diptych.text.silent_counts import with_silent_counts
from diptych.text.token_text import TokenText

_MAX_COUNT = 2**31 - 1  # ids and positions are int32 in every engine


class Tokenizer:
    """One model's tokenizer. Immutable; encoding and decoding from any thread.

    Special tokens written out in a text (``<|im_end|>``) are parsed as those
    tokens, in text prompts and chat contents alike, as other servers do: who
    writes the prompt is trusted with its structure. With ``inert_contents``
    contents of chats are not, see :mod:`diptych.text.inert`.
    """

    def __init__(self, folder: Path, *, inert_contents: bool = False) -> None:
        config_path, generation_path = folder / "config.json", folder / "generation_config.json"
        config = _text_config(read_object(config_path))
        settings = read_object(folder / "tokenizer_config.json", missing_ok=True)
        generation = read_object(generation_path, missing_ok=True)
        known = _special_tokens(folder, settings)
        self._tokenizer = _whole(folder, settings, known)
        added = self._tokenizer.get_added_tokens_decoder()
        eos_token_id = self._id_of(known.get("eos_token"), None)
        self.digest = text_digest(folder)
        """Equal where token ids mean the same, see :mod:`diptych.text.identity`."""
        self.vocab_size = _count(
            config, "vocab_size", config_path, self._tokenizer.get_vocab_size()
        )
        """Size of the model's output; valid token ids are below it."""
        self.text = TokenText(self._tokenizer)
        """What each token contributes to a text."""
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        """Tokens that structure a prompt; they have no text."""
        self.added_tokens = {token.content: id_ for id_, token in added.items()}
        """Texts that are always one token, special or not, and which."""
        begins = self._id_of(known.get("bos_token"), config.get("bos_token_id"))
        self.bos_token_id = next(
            iter(_token_ids("bos_token_id", begins, self.vocab_size, config_path)), None
        )
        """Begins text prompts, where the model wants it."""
        ends = "eos_token_id"
        eos_token_ids = {
            *_token_ids(ends, generation.get(ends), self.vocab_size, generation_path),
            *_token_ids(ends, config.get(ends), self.vocab_size, config_path),
        }
        if eos_token_id is not None and eos_token_id < self.vocab_size:
            eos_token_ids.add(eos_token_id)
        elif known.get("eos_token") and not eos_token_ids:
            raise ConfigurationError(
                f"{folder / 'tokenizer_config.json'}: eos_token {known['eos_token']!r} is no token "
                "that the model can draw, and no other file names an end"
            )
        self.eos_token_ids = frozenset(eos_token_ids)
        """Tokens that end an answer."""
        self.max_model_len = context_length(
            config, _count(config, "max_position_embeddings", config_path)
        )
        """Prompt and output tokens together, at most."""
        self.chat_template = _load_chat_template(folder, settings, known)
        """None if the model has none."""
        self.declared_response = settings.get("response_template")
        """What the makers say of an answer's form, see :mod:`diptych.text.response.template`."""
        self._control: ControlTokens | None = None
        if inert_contents and self.chat_template is not None:
            self._control = ControlTokens(self._tokenizer, self.chat_template.source)
        self.has_inert_contents = self._control is not None
        """Whether control tokens in contents of chats are plain text."""
        around = _ids_around_a_text(self._tokenizer, folder / "tokenizer.json")
        self._bos_prefix, self._drops_bos = self._bos_correction(
            settings.get("add_bos_token"), around[:1]
        )
        self._adds_eos = around[-1:] == [eos_token_id]  # tokenizer.json does
        self._eos_suffix: list[int] = []
        if settings.get("add_eos_token") and eos_token_id is not None and not self._adds_eos:
            self._eos_suffix = [eos_token_id]  # as transformers 4; its "false" takes none away
        self._max_token_length = self._find_max_token_length()

    @classmethod
    def from_folder(cls, folder: Path, *, inert_contents: bool = False) -> "Tokenizer":
        """Read a Hugging Face model folder. Blocking, up to seconds for large vocabularies.

        Raises:
            ConfigurationError: a file is missing or of an unsupported kind.
        """
        return cls(folder, inert_contents=inert_contents)

    def encode(
        self, text: str, *, add_special: bool = True, is_continued: bool = False
    ) -> list[int]:
        """Token ids of ``text``; ``add_special`` adds what the model wants around it.

        ``is_continued``: but nothing that ends a text, as other tokens come after it.
        """
        # `encode` would hold the GIL all the while, and an event loop beside it stand still.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special)
        ids: list[int] = encoding.ids
        if not add_special:
            return ids
        ids = ids[1:] if self._drops_bos else self._bos_prefix + ids
        if is_continued:
            return ids[:-1] if self._adds_eos else ids
        return ids + self._eos_suffix

    def encode_chat(self, prompt: MarkedText) -> list[int]:
        """Token ids of what ``render_chat`` made."""
        if self._control is None:
            return self.encode(prompt.text, add_special=False)
        return self._control.encode(prompt)

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of ``token_ids``, with or without the special ones among them."""
        # As in `encode`, the call for one alone would hold the GIL.
        (text,) = self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=skip_special)
        return str(text)

    def special_ids_in(self, text: str) -> frozenset[int]:
        """The special tokens that stand in ``text``, but those that end an answer."""
        return frozenset(
            each
            for each in self.special_token_ids - self.eos_token_ids
            if self.text.spelling(each).decode(errors="replace") in text
        )

    def render_chat(
        self,
        messages: Sequence[Message],
        arguments: Mapping[str, object] | None = None,
        tools: Sequence[Tool] = (),
        *,
        now_unix_s: int = 0,
    ) -> MarkedText:
        """The prompt of a chat, ending where the model's answer begins.

        ``arguments`` are further names that the model's template knows, ``now_unix_s`` is what
        it takes for now, in seconds since 1970 UTC; 0: what the clock says.

        Raises:
            InvalidRequestError: no template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise InvalidRequestError("this model has no chat template", field="chat")
        if tools and not self.chat_template.knows_tools:
            raise InvalidRequestError("this model's chat template knows none", field="chat.tools")
        render = partial(
            self.chat_template.render, messages, arguments, tools=tools, now_unix_s=now_unix_s
        )
        if self._control is None:
            return MarkedText(render())
        hidden = HiddenTexts(self._control)
        return hidden.restore(render(hide=hidden.hide))

    def min_tokens(self, text: str) -> int:
        """A lower bound, without tokenising, of how many tokens ``text`` has.

        It lets a server refuse a far too long text at once; 0 where the
        tokenizer allows no bound.
        """
        if self._max_token_length is None:
            return 0
        length = len(text.encode()) if self.text.is_byte_level else len(text)
        return math.ceil(length / self._max_token_length)

    def _id_of(self, text: str | None, default: int | None) -> int | None:
        found = None if text is None else self._tokenizer.token_to_id(text)
        return default if found is None else int(found)

    def _bos_correction(self, wanted: bool | None, first: list[int]) -> tuple[list[int], bool]:
        """tokenizer_config.json overrules what tokenizer.json adds before a text.

        Returns what to put before, and whether to take the first token away. ``first`` is that
        of a text.
        """
        if wanted is None or self.bos_token_id is None:
            return [], False
        bos = [self.bos_token_id]
        added = first == bos
        return ([] if added or not wanted else bos), (added and not wanted)

    def _find_max_token_length(self) -> int | None:
        """In bytes if byte-level, else in characters. None: a token may stand for any length."""
        normalizer = self._tokenizer.normalizer
        state = {} if normalizer is None else json.loads(normalizer.__getstate__())
        steps = state.get("normalizers", [state] if state else [])
        if any(map(_may_shorten, steps)):
            return None
        added = self._tokenizer.get_added_tokens_decoder().values()
        if any(token.lstrip or token.rstrip for token in added):
            return None
        spelt = [token.content.encode() if self.text.is_byte_level else "" for token in added]
        model = self._tokenizer.model  # those of unigrams do not say it
        if not self.text.is_byte_level and not getattr(model, "byte_fallback", False):
            return None
        # One character for each byte, but of added tokens, which are plain text.
        return max(len(token) for token in [*self._tokenizer.get_vocab(), *spelt])


def _may_shorten(step: Mapping[str, Any]) -> bool:
    """Whether a step of a normalizer may make less of a text, in characters or in bytes."""
    if step["type"] != "Replace":
        return bool(step["type"] != "Prepend")
    old, new = step["pattern"].get("String"), step["content"]
    return old is None or len(new) < len(old) or len(new.encode()) < len(old.encode())


def whole_tokenizer(folder: Path) -> HFTokenizer:
    """tokenizer.json with the tokens that other files of the folder name.

    Raises ConfigurationError.
    """
    settings = read_object(folder / "tokenizer_config.json", missing_ok=True)
    return _whole(folder, settings, _special_tokens(folder, settings))


def _whole(folder: Path, settings: dict[str, Any], special_tokens: dict[str, str]) -> HFTokenizer:
    tokenizer = _load_tokenizer(folder / "tokenizer.json")
    add_stated_tokens(tokenizer, folder, settings, special_tokens.values())
    bounds = [text for role, text in special_tokens.items() if role in ("bos_token", "eos_token")]
    add_named_tokens(tokenizer, settings, bounds)
    return tokenizer


def _special_tokens(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Texts by what they are for."""
    texts = {role: _token_text(folder, settings, role) for role in SPECIAL_TOKEN_ROLES}
    return {role: text for role, text in texts.items() if text is not None}


def _load_tokenizer(path: Path) -> HFTokenizer:
    if not path.is_file():
        raise ConfigurationError(f"{path}: there is no such file")
    try:
        tokenizer = HFTokenizer.from_file(str(path))
    except BaseException as error:  # noqa: BLE001 - the library raises plain Exception, or panics
        raise ConfigurationError(f"{path}: {_told_by_library(error)}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _ids_around_a_text(tokenizer: HFTokenizer, path: Path) -> list[int]:
    """Those of a short text and of what stands before and behind it."""
    try:
        ids: list[int] = tokenizer.encode("a", add_special_tokens=True).ids
    except BaseException as error:  # noqa: BLE001 - the library raises plain Exception, or panics
        told = _told_by_library(error)
        raise ConfigurationError(f"{path}: it has no tokens for 'a': {told}") from None
    return ids


def _told_by_library(error: BaseException) -> str:
    """Raises what is not the library's; a panic in Rust is, whose class has no other base."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    return str(error)


def _load_chat_template(
    folder: Path, settings: dict[str, Any], special_tokens: dict[str, str]
) -> ChatTemplate | None:
    """The template's own file wins over tokenizer_config.json."""
    found = _read_template(folder / "chat_template.jinja")
    source: Any = settings.get("chat_template") if found is None else found
    named: dict[str, Any] = {"default": source}
    if isinstance(source, list):  # several, by name
        try:
            named = {entry["name"]: entry["template"] for entry in source}
        except (KeyError, TypeError):
            path = folder / "tokenizer_config.json"
            raise ConfigurationError(
                f"{path}: chat_template must be a text, or a list of name and template"
            ) from None
    source, with_tools = named.get("default"), named.get("tool_use", "")
    found = _read_template(folder / "additional_chat_templates" / "tool_use.jinja")
    if found is not None:
        with_tools = found
    if not isinstance(source, str):
        return None
    return ChatTemplate(source, special_tokens, with_tools=with_tools)


def _read_template(path: Path) -> str | None:
    """None: there is no such file. Raises ConfigurationError."""
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: {error}") from None


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """What the config says of text; where the text part of a larger model is silent, of all."""
    text = config.get("text_config") or {}
    if not isinstance(text, dict):
        raise ConfigurationError(f"config.json: text_config must be an object, is {text!r}")
    return with_silent_counts(config | text)


def _count(config: dict[str, Any], key: str, path: Path, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise ConfigurationError(f"{path}: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_COUNT:
        raise ConfigurationError(
            f"{path}: {key} must be a positive whole number of 31 bits, is {value!r}"
        )
    return value


def _token_text(folder: Path, settings: dict[str, Any], role: str) -> str | None:
    """A special token is named by its text, or by an object with its properties."""
    entry = settings.get(role)
    text = entry.get("content") if isinstance(entry, dict) else entry
    if text is not None and not isinstance(text, str):
        raise ConfigurationError(
            f"{folder / 'tokenizer_config.json'}: {role} must be a token's text, is {entry!r}"
        )
    return text


def _token_ids(name: str, value: object, vocab_size: int, path: Path) -> list[int]:
    """What a file says under ``name``, as one token, several, or (None) none."""
    found: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    for each in found:
        if isinstance(each, bool) or not isinstance(each, int) or not 0 <= each < vocab_size:
            raise ConfigurationError(
                f"{path}: {name} must be of tokens below {vocab_size}, is {value!r}"
            )
    return found

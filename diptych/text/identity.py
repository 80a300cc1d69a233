"""Whether two processes mean the same by a token id. Reads a model's folder, no weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from diptych.json_file import read_object

_VERSION = b"diptych text 1\n"
# Say how or by what a folder was written, not what it means.
_VOLATILE_KEYS = frozenset({"_name_or_path", "name_or_path", "transformers_version"})


def text_digest(folder: Path) -> str:
    """Digest of the tokenizer and the model's config in ``folder``: 32 hexadecimal digits.

    A router and a worker that differ in it would read each other's token ids as other text.
    Empty where there is no tokenizer.

    Raises:
        ConfigurationError: the config is missing or malformed.
    """
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        return ""
    digest = xxhash.xxh3_128(_VERSION)
    digest.update(canonical(read_config(folder / "config.json")))
    digest.update(tokenizer.read_bytes())
    return digest.hexdigest()


def read_config(path: Path) -> dict[str, Any]:
    """A model's ``config.json`` without what says nothing of the model.

    Raises:
        ConfigurationError: it is missing or malformed.
    """
    content = read_object(path)
    return {key: value for key, value in content.items() if key not in _VOLATILE_KEYS}


def canonical(content: Mapping[str, Any]) -> bytes:
    """The same bytes for the same content, whatever the order of its keys."""
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()

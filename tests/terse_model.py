"""A tiny model that answers in a few tokens, calls of tools included. Numpy only.

Its texts are as random as the tiny model's. What ends a text is likely at every place but the
first; and so is the quotation mark, so that a text within JSON comes to its end.
"""

import json
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from tests.tiny_model import write_tiny_model

# No layer writes to these, so each position has them of its own token alone.
_ALWAYS: Final = 0
_BEGINNING: Final = 1
_GAIN: Final = 6.0


def write_terse_model(folder: Path) -> Path:
    """Write the folder, with a chat template that tells of tools, and return its path.

    Its tools' calls have the form of Hermes.
    """
    write_tiny_model(folder, "llama", name="terse", max_position=2048)
    weights = load_file(folder / "model.safetensors")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    _make_terse(weights, tokenizer)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    told = "{% if tools %}<turn>tools\n{{ tools | tojson }}<end>\n{% endif %}"
    settings["chat_template"] = told + settings["chat_template"]
    path.write_text(json.dumps(settings))
    return folder


def _make_terse(weights: dict[str, NDArray[np.float32]], tokenizer: Tokenizer) -> None:
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[[_ALWAYS, _BEGINNING]] = 0
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    weights["model.norm.weight"][[_ALWAYS, _BEGINNING]] = 1
    embedding[:, _ALWAYS], embedding[:, _BEGINNING] = _GAIN, 0
    head[:, [_ALWAYS, _BEGINNING]] = 0
    begins, ends, quotes = (tokenizer.encode(each).ids[0] for each in ("\n", "<end>", '"'))
    embedding[begins, _BEGINNING] = _GAIN  # a prompt ends with a line's end
    head[[ends, quotes], _ALWAYS] = _GAIN
    head[ends, _BEGINNING] = -2 * _GAIN

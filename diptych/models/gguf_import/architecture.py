"""What each supported architecture calls its tensors, and how llama.cpp changed them.

Two changes are undone: the rows of the query and key projections of the Llama
family, which llama.cpp reorders from split halves to adjacent pairs for its
rotary embedding, and the 1 that it adds to Gemma's norm weights.
"""

import re
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from diptych.errors import ConfigurationError
from diptych.models.gguf_import.gguf_file import GGUFFile
from diptych.models.gguf_import.rope import DIVISORS_TENSOR

Array: TypeAlias = NDArray[Any]  # of float32, or the bytes of whole rows

_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA = _ATTENTION | _MLP | {"ffn_norm": "post_attention_layernorm"}
_GEMMA3 = (
    _ATTENTION
    | _MLP
    | {
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_OUTER_NAME = re.compile(r"(\w+)\.(weight)")


class Restore(Protocol):
    """Turns a tensor as llama.cpp stores it into the checkpoint's; same shape."""

    def __call__(self, name: str, tensor: Array) -> Array:
        """``name`` is the checkpoint's."""


class Architecture(NamedTuple):
    """Names and changes of one architecture, for one file."""

    name: str  # llama.cpp's, which prefixes the metadata keys
    block_names: dict[str, str]
    restore: Restore
    config_tensors: frozenset[str] = frozenset()  # these become settings in config.json

    def checkpoint_name(self, gguf_name: str) -> str:
        """The checkpoint's name of a tensor; raises ConfigurationError if there is none."""
        if match := _BLOCK_NAME.fullmatch(gguf_name):
            index, part, kind = match.groups()
            if part in self.block_names:
                return f"model.layers.{index}.{self.block_names[part]}.{kind}"
        elif (match := _OUTER_NAME.fullmatch(gguf_name)) and match[1] in _OUTER:
            return f"{_OUTER[match[1]]}.weight"
        raise ConfigurationError(
            f"tensor {gguf_name!r} of architecture {self.name!r} cannot be imported"
        )


def architecture_of(file: GGUFFile) -> Architecture:
    """The architecture of ``file``; raises ConfigurationError if it is not supported."""
    name = file.string("general.architecture")
    if name == "llama":
        num_heads = file.count("llama.attention.head_count")
        num_kv_heads = file.count("llama.attention.head_count_kv", num_heads)
        restore = _restore_llama(num_heads, num_kv_heads)
        return Architecture(name, _LLAMA, restore, frozenset({DIVISORS_TENSOR}))
    if name == "gemma3":
        return Architecture(name, _GEMMA3, _restore_gemma)
    raise ConfigurationError(
        f"{file.path}: GGUF architecture {name!r} is not supported (llama and gemma3 are); "
        "use the model's Hugging Face folder"
    )


def _restore_llama(num_heads: int, num_kv_heads: int) -> Restore:
    def restore(name: str, tensor: Array) -> Array:
        if ".q_proj." in name:
            return split_halves(tensor, num_heads)
        if ".k_proj." in name:
            return split_halves(tensor, num_kv_heads)
        return tensor

    return restore


def split_halves(tensor: Array, num_heads: int) -> Array:
    """Reorder each head's rows from (pair, 2) to (2, pair).

    tensor: [num_heads * head_dim, ...], the rotary pair's two rows adjacent.
    Returns the same shape with all first rows before all second ones.
    """
    pairs = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(tensor.shape)


def _restore_gemma(name: str, tensor: Array) -> Array:
    return tensor - np.float32(1) if name.endswith("norm.weight") else tensor

"""What Hugging Face transformers says: logits and greedy tokens of a model folder."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.golden_rule import MARGIN, Resume, Run

# A linear layer: input [num_rows, in_features], weight, bias.
Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class ForcedRun(NamedTuple):
    logits: torch.Tensor  # [num_tokens, vocab_size] float32
    # By linear layer: how far its own input was from the one given, relative to it (euclidean),
    # of the worst token.
    distances: dict[str, float]


@cache
def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The transformers model of ``folder``, for inference."""
    from transformers import AutoConfig, AutoModelForCausalLM

    # Of its ways to attend this one alone caps scores.
    capped = getattr(AutoConfig.from_pretrained(folder), "attn_logit_softcapping", None)
    way = {"attn_implementation": "eager"} if capped else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **way)


def write_gemma3_with_images(folder: Path) -> None:
    """A random Gemma 3 of text and images, as transformers writes it, with a tiny vision tower."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 640,
        "query_pre_attn_scalar": 24,
        "sliding_window": 32,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},  # of full layers
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "initializer_range": 0.3,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    torch.manual_seed(0)
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)


def chat_ids(folder: Path, question: str) -> list[int]:
    """The prompt that the model's own chat template makes of one question."""
    from transformers import AutoTokenizer

    messages = [{"role": "user", "content": question}]
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    made = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return list(made["input_ids"])


@torch.inference_mode()
def logits(
    folder: Path, token_ids: Sequence[int], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Logits after each token. Returns [num_tokens, vocab_size] float32."""
    result: torch.Tensor = load(folder, dtype)(torch.tensor([list(token_ids)])).logits[0].float()
    return result


@torch.inference_mode()
def logit_chunks(
    folder: Path,
    token_ids: Sequence[int],
    num_rows: int,
    dtype: torch.dtype = torch.float32,
    split_at: int | None = None,
) -> Iterator[torch.Tensor]:
    """The same, so many rows at a time: all rows of a large vocabulary are gigabytes.

    ``split_at``: no chunk has rows both before and after this one. The layers compute in
    ``dtype``; the head in float32, whose sums of one layer are as good as exact.
    """
    model = load(folder, dtype)
    assert getattr(model.config, "final_logit_softcapping", None) is None
    hidden = model.model(torch.tensor([list(token_ids)])).last_hidden_state[0].float()
    head = model.lm_head.weight.float()
    for part in hidden.split([split_at, len(hidden) - split_at] if split_at else [len(hidden)]):
        for rows in part.split(num_rows):
            yield rows @ head.T


@torch.inference_mode()
def forced_logits(
    folder: Path,
    token_ids: Sequence[int],
    inputs: Mapping[str, torch.Tensor],
    multiply: Multiply = torch.nn.functional.linear,
    dtype: torch.dtype = torch.float32,
) -> ForcedRun:
    """The same where every linear layer goes on with what it is given here.

    inputs: [num_tokens, in_features] by name such as ``model.layers.0.mlp.down_proj``.
    """
    model = load(folder, dtype)
    distances: dict[str, float] = {}

    def force(name: str, linear: torch.nn.Linear, args: Any, output: torch.Tensor) -> torch.Tensor:
        own, given = args[0][0].float(), inputs[name].float()
        distances[name] = float(((own - given).norm(dim=1) / own.norm(dim=1)).max())
        return multiply(inputs[name], linear.weight, linear.bias)[None]

    handles = [
        module.register_forward_hook(partial(force, name))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    try:
        return ForcedRun(logits(folder, token_ids, dtype), distances)
    finally:
        for handle in handles:
            handle.remove()


def multiply_int8(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """What ``--quantization int8`` defines, in float64: sums are exact.

    A row of the weight, and each 64 inputs of a row of x, are whole numbers of -127 to
    127 times a scale of their own.
    """
    y = (_rounded(x.view(len(x), -1, 64)).flatten(1) @ _rounded(weight).T).float()
    return y if bias is None else y + bias


def _rounded(rows: torch.Tensor) -> torch.Tensor:
    scales = rows.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return (rows * (1 / scales)).round().double() * scales.double()


@torch.inference_mode()
def greedy(folder: Path, token_ids: Sequence[int], num_tokens: int) -> Run:
    """The next ``num_tokens`` most likely tokens, end-of-sequence ignored."""
    model = load(folder)
    ids, cache_ = torch.tensor([list(token_ids)]), None
    run = Run([], [])
    for _ in range(num_tokens):
        logits, cache_ = next_logits(model, ids, cache_)
        top = torch.topk(logits[0], 2)
        run.token_ids.append(int(top.indices[0]))
        run.margins.append(float(top.values[0] - top.values[1]))
        ids = top.indices[:1].view(1, 1)
    return run


def next_logits(model: Any, token_ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
    """Logits ``[batch, vocabulary]`` behind ``token_ids [batch, tokens]``, and the cache with them.

    The cache is by position: transformers gave it another name in 5.24.
    """
    output = model(token_ids, None, None, cache, use_cache=True, logits_to_keep=1)
    return output.logits[:, -1], output[1]


def resume(folder: Path, token_ids: Sequence[int], num_tokens: int) -> Resume:
    """How the greedy answer of so many tokens to a prompt goes on after the other token of a tie.

    It must have been close to the best one.
    """

    def after(prefix: Sequence[int]) -> Run:
        *before, other = prefix
        below = _below_the_best(folder, [*token_ids, *before], other)
        assert below < MARGIN, f"token {other} at {len(before)} was {below:.4g} below the best"
        return greedy(folder, [*token_ids, *prefix], num_tokens - len(prefix))

    return after


@torch.inference_mode()
def _below_the_best(folder: Path, token_ids: Sequence[int], other: int) -> float:
    """How much less likely ``other`` is to come next than the best token, as logits."""
    last = load(folder)(torch.tensor([list(token_ids)]), logits_to_keep=1).logits[0, -1]
    return float(last.max() - last[other])
